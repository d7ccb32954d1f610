// Formulas: the part of TeX that models write, as MathML. A formula with anything else stays as it was written.

import { elementIn } from "./dom.js";

const made = elementIn("http://www.w3.org/1998/Math/MathML");
const MOST_CHARACTERS = 3000;
const MOST_DEPTH = 40;

/** "name sign name sign ...", or names of consecutive characters. */
function table(text) {
  const words = text.split(" ");
  return new Map(words.flatMap((word, at) => (at % 2 ? [] : [[word, words[at + 1]]])));
}
const run = (first, names) => names.split(" ").map((name, at) => [name, String.fromCodePoint(first + at)]);

const LETTERS = new Map([
  ...run(0x3b1, "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau upsilon varphi chi psi omega"),
  ...run(0x391, "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho . Sigma Tau Upsilon Phi Chi Psi Omega"),
  ...table("phi ϕ varepsilon ε infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ emptyset ∅ dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱"),
]);
const SIGNS = table(
  "times × cdot ⋅ pm ± mp ∓ div ÷ ast ∗ circ ∘ oplus ⊕ otimes ⊗ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ ll ≪ gg ≫ approx ≈ equiv ≡ sim ∼ propto ∝ " +
  "in ∈ notin ∉ subset ⊂ subseteq ⊆ supset ⊃ cup ∪ cap ∩ setminus ∖ forall ∀ exists ∃ neg ¬ land ∧ wedge ∧ lor ∨ vee ∨ to → rightarrow → " +
  "leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⇒ iff ⇔ mapsto ↦ mid ∣ parallel ∥ perp ⊥ angle ∠ " +
  "therefore ∴ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ { { } } | ‖ _ _ % % $ $ # # & & int ∫",
);
const LARGE = table("sum ∑ prod ∏ bigcup ⋃ bigcap ⋂");
const ACCENTS = table("hat ^ widehat ^ bar ¯ overline ¯ vec → dot ˙ ddot ¨ tilde ~");
const SPACES = table(", .17em : .22em ; .28em ! 0 quad 1em qquad 2em").set(" ", ".25em");
const FENCES = { pmatrix: "()", bmatrix: "[]", vmatrix: "||", cases: "{" };
const FUNCTIONS = /^(a(rc)?(sin|cos|tan)|sinh?|cosh?|tanh?|exp|log|ln|det|dim|ker|gcd|arg|Pr)$/;
const LIMITS = /^(lim|max|min|sup|inf|arg(max|min))$/;
const BLACKBOARD = new Map(["Cℂ", "Hℍ", "Nℕ", "Pℙ", "Qℚ", "Rℝ", "Zℤ"].map((pair) => [...pair]));
const TOKEN = /\\(?:[a-zA-Z]+|[^])|\d+(?:\.\d+)?|\s+|[^]/gu;

/** An element for a formula; null where that is not possible. */
export function formula(source, isBlock) {
  if (source.length > MOST_CHARACTERS) return null;
  try {
    const reader = new Reader(source, isBlock);
    const content = reader.row();
    if (reader.next !== undefined) return null;
    return made("math", isBlock ? { display: "block" } : {}, content);
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

class Unknown extends Error {}

class Reader {
  constructor(source, isBlock) {
    const found = [...source.matchAll(TOKEN)].filter(([token]) => token.trim());
    Object.assign(this, { source, isBlock, at: 0, depth: 0 });
    this.tokens = found.map(([token]) => token);
    this.places = found.map(({ index }) => index);
  }

  get next() {
    return this.tokens[this.at];
  }

  take() {
    if (this.next === undefined) this.fail();
    return this.tokens[this.at++];
  }

  expect(token) {
    if (this.take() !== token) this.fail();
  }

  /** Up to what ends a group, a cell or a pair of fences. */
  row() {
    this.depth += 1;
    if (this.depth > MOST_DEPTH) this.fail();
    const parts = [];
    while (![undefined, "}", "&", "\\\\", "\\right", "\\end"].includes(this.next)) parts.push(this.scripted());
    this.depth -= 1;
    return made("mrow", {}, ...parts);
  }

  scripted() {
    if (this.next === undefined) this.fail();
    const hasLimits = this.isBlock && (LARGE.has(this.next.slice(1)) || LIMITS.test(this.next.slice(1)));
    const base = this.next === "^" || this.next === "_" ? made("mrow") : this.atom();
    const scripts = {};
    for (;;) {
      if (this.next === "^" || this.next === "_") scripts[this.take()] = this.argument();
      else if (this.next === "'") scripts["^"] = made("mrow", {}, ...(scripts["^"] ? [scripts["^"]] : []), made("mo", {}, (this.take(), "′")));
      else break;
    }
    const { _: below, "^": above } = scripts;
    const [under, over] = hasLimits ? ["under", "over"] : ["sub", "sup"];
    const names = (below ? under : "") + (above ? over : "");
    return names ? made(`m${names}`, {}, ...[base, below, above].filter(Boolean)) : base;
  }

  /** A group or one sign, so one digit. */
  argument() {
    if (/^\d./.test(this.next)) {
      const number = this.next;
      this.tokens[this.at] = number.slice(1);
      return made("mn", {}, number[0]);
    }
    if (this.next !== "{") return this.atom();
    this.take();
    const content = this.row();
    this.expect("}");
    return content;
  }

  /** As it stands: a group's text. */
  text() {
    this.expect("{");
    const start = this.places[this.at - 1] + 1;
    while (this.next !== "}") this.take();
    return this.source.slice(start, this.places[this.at++]);
  }

  atom() {
    const token = this.next;
    if (token === "{") return this.argument();
    this.take();
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/\d/.test(token)) return made("mn", {}, token);
    return /\p{L}/u.test(token) ? made("mi", {}, token) : made("mo", "()[]|".includes(token) ? { stretchy: "false" } : {}, token === "-" ? "−" : token);
  }

  command(name) {
    const { isBlock } = this;
    if (LETTERS.has(name)) return made("mi", {}, LETTERS.get(name));
    if (SIGNS.has(name)) return made("mo", { stretchy: "false" }, SIGNS.get(name));
    if (LARGE.has(name)) return made("mo", {}, LARGE.get(name));
    if (SPACES.has(name)) return made("mspace", { width: SPACES.get(name) });
    if (FUNCTIONS.test(name) || LIMITS.test(name)) return made("mi", { mathvariant: "normal" }, name);
    if (ACCENTS.has(name)) return made("mover", { accent: "true" }, this.argument(), made("mo", {}, ACCENTS.get(name)));
    switch (name) {
      case "frac": case "dfrac": case "tfrac":
        return made("mfrac", {}, this.argument(), this.argument());
      case "binom":
        return made("mrow", {}, made("mo", {}, "("), made("mfrac", { linethickness: "0" }, this.argument(), this.argument()), made("mo", {}, ")"));
      case "sqrt":
        return this.root();
      case "left":
        return this.fenced();
      case "begin":
        return this.rows(this.text().replace("*", ""));
      case "text": case "textbf": case "mathrm": case "operatorname":
        return made("mtext", {}, this.text());
      case "mathbb":
        return made("mi", {}, BLACKBOARD.get(this.text()) ?? this.fail());
      case "mathbf": case "boldsymbol": case "mathcal": case "boxed": case "displaystyle": case "limits":
        return name[0] === "d" || name[0] === "l" ? made("mrow") : made("mrow", name.includes("b") ? { class: "strong" } : {}, this.argument());
      default:
        return isBlock && name === "tag" ? made("mtext", {}, `(${this.text()})`) : this.fail();
    }
  }

  fail() {
    throw new Unknown();
  }

  root() {
    if (this.next !== "[") return made("msqrt", {}, this.argument());
    this.take();
    const parts = [];
    while (this.next !== "]") parts.push(this.scripted());
    this.take();
    return made("mroot", {}, this.argument(), made("mrow", {}, ...parts));
  }

  fence() {
    const token = this.take();
    return made("mo", { fence: "true" }, token === "." ? "" : (SIGNS.get(token.slice(1)) ?? token));
  }

  fenced() {
    const [opening, content] = [this.fence(), this.row()];
    this.expect("\\right");
    return made("mrow", {}, opening, content, this.fence());
  }

  rows(name) {
    const isAligned = /^(align(ed)?|split|gather(ed)?|equation)$/.test(name);
    if (!isAligned && name !== "matrix" && !FENCES[name]) this.fail();
    const rows = [[this.row()]];
    for (let token = this.take(); token !== "\\end"; token = this.take()) {
      if (token === "&") rows.at(-1).push(this.row());
      else if (token === "\\\\") rows.push([this.row()]);
      else this.fail();
    }
    this.text();
    const kind = isAligned ? { class: "aligned" } : name === "cases" ? { class: "cases" } : {};
    const lines = rows.map((cells) => made("mtr", {}, ...cells.map((cell) => made("mtd", {}, cell))));
    const [opening, closing] = [...(FENCES[name] ?? "")].map((sign) => made("mo", { fence: "true" }, sign));
    return made("mrow", {}, ...[opening, made("mtable", kind, ...lines), closing].filter(Boolean));
  }
}
