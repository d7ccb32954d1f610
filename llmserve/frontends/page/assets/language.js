// The page's words in the language that was chosen, or that the browser prefers.

import { forGood } from "./store.js";
import { STRINGS } from "./strings.js";

const listeners = new Set();
let current = forGood.get("language") ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

export const language = () => current;

/** `{name}` in a text stands for a value. */
export function text(name, values = {}) {
  return STRINGS[current][name].replace(/\{(\w+)\}/g, (_, key) => values[key]);
}

export function number(value, digits = 0) {
  return value.toLocaleString(current, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const dateTime = (time) => new Date(time).toLocaleString(current, { dateStyle: "medium", timeStyle: "short" });

export function setLanguage(name) {
  current = name;
  forGood.set("language", name);
  translate();
}

/** Called now and whenever the language changes. */
export function whenTranslated(listener) {
  listeners.add(listener);
  listener();
}

/** Everything in the markup that names its text. */
export function translate(root = document) {
  document.documentElement.lang = current === "zh" ? "zh-CN" : "en";
  for (const node of root.querySelectorAll("[data-text]")) node.textContent = text(node.dataset.text);
  for (const node of root.querySelectorAll("[data-placeholder]")) node.placeholder = text(node.dataset.placeholder);
  for (const node of root.querySelectorAll("[data-label]")) node.setAttribute("aria-label", text(node.dataset.label));
  for (const node of root.querySelectorAll("[data-title]")) {
    node.title = text(node.dataset.title);
    node.setAttribute("aria-label", node.title);
  }
  for (const listener of listeners) listener();
}
