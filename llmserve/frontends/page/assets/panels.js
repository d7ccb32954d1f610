// What opens at the side, one at a time, and the dialogs.

import { byId, element } from "./dom.js";
import { text as say, whenTranslated } from "./language.js";
import { forGood } from "./store.js";

const PANELS = ["settings", "server", "chats"];
const LEFT = "chats";
const KEYS = [
  [["Enter"], "send"],
  [["Shift", "Enter"], "keyLine"],
  [["/"], "keyFocus"],
  [["Esc"], "keyStop"],
  [["↑"], "keyEditLast"],
  [["Alt", "N"], "newChat"],
  [["Alt", "R"], "again"],
  [["Alt", "L"], "chats"],
  [["Alt", "S"], "settings"],
  [["Alt", "M"], "server"],
  [["Alt", "K"], "keyHelp"],
];

const isNarrow = () => !matchMedia("(min-width: 60rem)").matches;

export class Panels {
  /** `opened` is called with the name of a panel. */
  constructor(opened) {
    this.opened = opened;
    for (const name of PANELS) {
      byId(`open-${name}`).addEventListener("click", () => this.toggle(name));
      byId(name).querySelector(".close").addEventListener("click", () => this.close(name));
      if (forGood.get(`panel.${name}`) && !isNarrow()) this.show(name);
    }
    byId("show-shortcuts").addEventListener("click", showShortcuts);
    byId("shortcuts-close").addEventListener("click", () => byId("shortcuts-dialog").close());
    whenTranslated(fillShortcuts);
  }

  /** What Escape closes: what covers something, or is at the right. */
  get current() {
    return PANELS.find((name) => !byId(name).hidden && (name !== LEFT || isNarrow())) ?? null;
  }

  toggle(name) {
    if (byId(name).hidden) this.open(name);
    else this.close(name);
  }

  open(name) {
    this.show(name);
    const panel = byId(name);
    (panel.querySelector("input, select, textarea") ?? panel.querySelector("button")).focus();
  }

  /** There is room for one at each side, and on a phone for one. */
  show(name) {
    const isHidden = (each) => each !== name && (isNarrow() || (each === LEFT) === (name === LEFT));
    for (const each of PANELS) this.set(each, each === name || (!isHidden(each) && !byId(each).hidden));
    this.opened(name);
  }

  set(name, isOpen) {
    byId(name).hidden = !isOpen;
    byId(`open-${name}`).setAttribute("aria-expanded", isOpen);
    forGood.set(`panel.${name}`, isOpen || null);
  }

  /** The focus goes back to where it opens. */
  close(name = this.current) {
    if (!name) return;
    this.set(name, false);
    byId(`open-${name}`).focus();
  }
}

export function showShortcuts() {
  byId("shortcuts-dialog").showModal();
}

function fillShortcuts() {
  const rows = KEYS.flatMap(([keys, name]) => {
    const caps = keys.flatMap((key, index) => (index ? [" ", element("kbd", {}, key)] : [element("kbd", {}, key)]));
    return [element("dt", {}, ...caps), element("dd", {}, say(name))];
  });
  byId("shortcuts-list").replaceChildren(...rows);
}
