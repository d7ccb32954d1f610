// Elements. Text becomes text nodes, whatever is in it; there is no other way from a text to the page.

export const byId = (id) => document.getElementById(id);

/** An element with properties and children; `dataset` and `attributes` are objects. */
export function element(tag, { dataset = {}, attributes = {}, ...properties } = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  Object.assign(made.dataset, dataset);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** What makes elements of another namespace. */
export const elementIn = (namespace) => (tag, attributes = {}, ...children) => {
  const made = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

export const drawing = elementIn("http://www.w3.org/2000/svg");

/** A button that shows a symbol of the page, and says what it does. */
export function iconButton(symbol, label, act) {
  const icon = drawing("svg", { "aria-hidden": "true" }, drawing("use", { href: `#i-${symbol}` }));
  const button = element("button", { type: "button", className: "icon", title: label, dataset: { act: symbol } }, icon);
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

/** Runs each of the given functions once in the next frame, however often it is asked for. */
export function frameScheduler() {
  const due = new Set();
  const run = () => {
    const now = [...due];
    due.clear();
    for (const work of now) work();
  };
  return (work) => {
    if (due.size === 0) requestAnimationFrame(run);
    due.add(work);
  };
}

/** As a file of the browser's downloads. */
export function saveAs(name, content) {
  const url = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Puts a text into the clipboard; without one (plain http from another machine) by way of a selection. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { value: text, className: "unseen" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
