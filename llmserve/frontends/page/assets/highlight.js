// Code in colours: comments, strings, numbers and the words of common languages. No grammar, so never far from wrong.

import { element } from "./dom.js";

const WORDS = new Set(
  ("abstract and as assert async await bool boolean break case catch char class const continue def default defer del do " +
   "double elif else enum except export extends false finally float fn for from func function global go if impl implements " +
   "import in int interface is lambda let long loop match mod mut namespace new nil none not null or package pass private " +
   "protected pub public raise return self short static string struct super switch template this throw throws trait true try " +
   "type typedef undefined unsigned use using var void where while with yield then fi done echo local begin end select insert " +
   "update delete into values create table join left right inner on group by order having limit union distinct set").split(" "),
);
const STRINGS = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|${"`"}(?:\\.|[^${"`"}\\])*${"`"}?`;
const NUMBERS_AND_WORDS = String.raw`\b\d[\w.]*|[A-Za-z_$][\w$-]*`;
const COMMENTS = [
  [/^(py|python\d?|sh|bash|shell|zsh|rb|ruby|ya?ml|toml|r|perl|make|makefile|dockerfile|ini|conf)$/i, "#.*"],
  [/^(sql|lua|haskell|hs)$/i, "--.*"],
  [/^(html|xml|svg|vue)$/i, "<!--[^]*?(?:-->|$)|</?[\\w-]+"],
  [/^(text|txt|plain|plaintext|output|console|markdown|md|csv|log)$/i, null],
  [/./, String.raw`//.*|/\*[^]*?(?:\*/|$)`],
];

/** Nodes for code in a language; only text where the language is not named. */
export function highlighted(code, language) {
  const comments = COMMENTS.find(([names]) => names.test(language))?.[1];
  if (!comments) return [code];
  const nodes = [];
  let at = 0;
  for (const found of code.matchAll(new RegExp(`(${comments})|(${STRINGS})|${NUMBERS_AND_WORDS}`, "g"))) {
    const [part, comment, string] = found;
    const kind = comment ? (comment.startsWith("<") && !comment.startsWith("<!") ? "word" : "comment") : string ? "string" : kindOf(part);
    if (!kind) continue;
    nodes.push(code.slice(at, found.index), element("span", { className: `c-${kind}` }, part));
    at = found.index + part.length;
  }
  return [...nodes, code.slice(at)];
}

function kindOf(word) {
  if (/^\d/.test(word)) return "number";
  return WORDS.has(word) || WORDS.has(word.toLowerCase()) ? "word" : "";
}
