// The part of Markdown that models write, as elements. Nothing in a text becomes anything but these elements, formulas and text;
// images are shown as their text, and only http(s) links can be followed.

import { copyText, element, iconButton } from "./dom.js";
import { formula } from "./formulas.js";
import { highlighted } from "./highlight.js";
import { text as say } from "./language.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const FORMULA = /^\s*(?:\$\$|\\\[)/;
const WHOLE_FORMULA = /^\s*(?:\$\$([^$]+)\$\$|\\\[([^]+?)\\\])[.,]?\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const ROW = /^\s*\|(.+)\|\s*$/;
const DIVIDER = /^\s*\|?(?:\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
const MOST_FORMULA_LINES = 60;
// with bounds, so that no text takes long
const INLINE = new RegExp(
  [
    "(?<!`)(`{1,3})(?!`)(?<code>.{1,2000}?)\\1(?!`)",
    "\\\\\\((?<round>.{1,1000}?)\\\\\\)",
    "(?<![\\w$])\\$(?=[^\\s$])(?<dollars>[^$\\n]{1,1000}?)(?<=\\S)\\$(?![\\w$])",
    "\\*\\*(?=\\S)(?<strong>.{1,2000}?)(?<=\\S)\\*\\*",
    "(?<![*\\w])\\*(?=\\S)(?<emphasis>[^*\\n]{1,2000}?)(?<=\\S)\\*(?![*\\w])",
    "~~(?=\\S)(?<struck>.{1,2000}?)(?<=\\S)~~",
    "\\[(?<label>[^\\]\\n]{1,500})\\]\\((?<target>https?:\\/\\/[^\\s()]{1,2000})\\)",
  ].join("|"),
  "su",
);

/** The blocks of a text: `kind`, `source` (what tells that one has changed), and what `kind` needs. */
function blocksOf(source) {
  const lines = source.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const begin = at;
    const block = blockAt(lines, at);
    at = block.end;
    blocks.push({ ...block, source: lines.slice(begin, at).join("\n") });
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) {
    let end = at + 1;
    while (end < lines.length && !lines[end].trimStart().startsWith(fence[1])) end += 1;
    return { kind: "code", language: fence[2], lines: lines.slice(at + 1, end), end: Math.min(end + 1, lines.length) };
  }
  if (FORMULA.test(line)) {
    const whole = formulaAt(lines, at);
    if (whole) return whole;
  }
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (ROW.test(line) && DIVIDER.test(lines[at + 1] ?? "")) return { kind: "table", ...run(lines, at, (row) => ROW.test(row)) };
  if (QUOTE.test(line)) return { kind: "quote", ...run(lines, at, (next) => QUOTE.test(next)) };
  if (ITEM.test(line)) return { kind: "list", ...run(lines, at, isOfList) };
  return { kind: "text", ...run(lines, at, (next) => next.trim() && !FENCE.test(next) && !HEADING.test(next) && !ITEM.test(next) && !FORMULA.test(next)) };
}

/** A formula of its own, once its end has come. */
function formulaAt(lines, at) {
  for (let end = at + 1; end <= Math.min(lines.length, at + MOST_FORMULA_LINES); end += 1) {
    const [, dollars, square] = WHOLE_FORMULA.exec(lines.slice(at, end).join("\n")) ?? [];
    if (dollars ?? square) return { kind: "formula", text: dollars ?? square, end };
  }
  return null;
}

function isOfList(line, previous) {
  return ITEM.test(line) || (line.trim() && /^\s+/.test(line)) || (line.trim() && previous.trim() && !HEADING.test(line) && !FENCE.test(line));
}

function run(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end], lines[end - 1])) end += 1;
  return { lines: lines.slice(at, end), end };
}

/** Brings the children of `container` up to date with a text; blocks that are as before stay what they are. */
export function showMarkdown(container, source) {
  const blocks = blocksOf(source);
  blocks.forEach((block, index) => {
    const shown = container.children[index];
    if (shown && shown.source === block.source && shown.kind === block.kind) return;
    const made = elementOf(block);
    made.source = block.source;
    made.kind = block.kind;
    if (shown) shown.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function elementOf(block) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "formula":
      return element("div", { className: "formula", dir: "ltr" }, formula(block.text, true) ?? element("code", {}, block.text));
    case "heading":
      return element(`h${Math.min(block.level + 2, 5)}`, {}, ...inline(block.text));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...inline(block.lines.map((line) => QUOTE.exec(line)[1]).join("\n")));
    case "list":
      return list(block.lines);
    case "table":
      return table(block.lines);
    default:
      return element("p", {}, ...inline(block.lines.join("\n")));
  }
}

function codeBlock({ lines, language }) {
  const content = lines.join("\n");
  const code = element("code", language ? { dataset: { language } } : {}, ...highlighted(content, language));
  const copy = iconButton("copy", say("copyCode"), () => copyText(content));
  return element("div", { className: "block" }, element("pre", { tabIndex: 0 }, code), copy);
}

/** Items by their indentation; lines that are none go on with the item before. */
function list(lines) {
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found) items.push({ depth: found[1].length, marker: found[2], text: found[3] });
    else items.at(-1).text += `\n${line.trim()}`;
  }
  return nested(items);
}

function nested(items) {
  const [{ depth, marker }] = items;
  const number = Number.parseInt(marker, 10);
  const made = Number.isNaN(number) ? element("ul") : element("ol", { start: number });
  for (let at = 0; at < items.length; ) {
    let end = at + 1;
    while (end < items.length && items[end].depth > depth) end += 1;
    const item = element("li", {}, ...inline(items[at].text));
    if (end > at + 1) item.append(nested(items.slice(at + 1, end)));
    made.append(item);
    at = end;
  }
  return made;
}

function table([head, , ...rows]) {
  const cells = (row, tag) => ROW.exec(row)[1].split("|").map((cell) => element(tag, {}, ...inline(cell.trim())));
  const line = (row, tag) => element("tr", {}, ...cells(row, tag));
  const body = rows.map((row) => line(row, "td"));
  return element("table", {}, element("thead", {}, line(head, "th")), element("tbody", {}, ...body));
}

/** Nodes for a text with emphasis, code and links. */
function inline(text) {
  const nodes = [];
  let rest = text;
  for (let found; (found = INLINE.exec(rest)); ) {
    if (found.index) nodes.push(rest.slice(0, found.index));
    nodes.push(inlineElement(found.groups));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

function inlineElement({ code, round, dollars, strong, emphasis, struck, label, target }) {
  const tex = round ?? dollars;
  if (tex !== undefined) return formula(tex, false) ?? (round ? `\\(${tex}\\)` : `$${tex}$`);
  if (code !== undefined) return element("code", {}, code.trim() || code);
  if (strong !== undefined) return element("strong", {}, ...inline(strong));
  if (emphasis !== undefined) return element("em", {}, ...inline(emphasis));
  if (struck !== undefined) return element("del", {}, ...inline(struck));
  return element("a", { href: target, target: "_blank", rel: "noopener noreferrer", title: target }, label);
}
