// What opens at the side, one at a time, and the dialogs.

import { byId, element } from "./dom.js";
import { text as say, whenTranslated } from "./language.js";
import { forGood } from "./store.js";

const PANELS = ["settings", "server"];
const KEYS = [
  [["Enter"], "keySend"],
  [["Shift", "Enter"], "keyLine"],
  [["/"], "keyFocus"],
  [["Esc"], "keyStop"],
  [["↑"], "keyEditLast"],
  [["Alt", "N"], "keyNew"],
  [["Alt", "R"], "keyAgain"],
  [["Alt", "S"], "keySettings"],
  [["Alt", "M"], "keyServer"],
  [["Alt", "K"], "keyHelp"],
];

export class Panels {
  /** `opened` is called with the name of a panel. */
  constructor(opened) {
    this.opened = opened;
    for (const name of PANELS) {
      byId(`open-${name}`).addEventListener("click", () => this.toggle(name));
      byId(name).querySelector(".close").addEventListener("click", () => this.close());
    }
    byId("show-shortcuts").addEventListener("click", showShortcuts);
    byId("shortcuts-close").addEventListener("click", () => byId("shortcuts-dialog").close());
    whenTranslated(fillShortcuts);
    const last = forGood.get("panel");
    if (PANELS.includes(last) && matchMedia("(min-width: 60rem)").matches) this.show(last);
  }

  get current() {
    return PANELS.find((name) => !byId(name).hidden) ?? null;
  }

  toggle(name) {
    if (this.current === name) this.close();
    else this.open(name);
  }

  open(name) {
    this.show(name);
    const panel = byId(name);
    (panel.querySelector("input, select, textarea") ?? panel.querySelector("button")).focus();
  }

  show(name) {
    for (const each of PANELS) {
      byId(each).hidden = each !== name;
      byId(`open-${each}`).setAttribute("aria-expanded", each === name);
    }
    forGood.set("panel", name);
    if (name) this.opened(name);
  }

  /** The focus goes back to where it opens. */
  close() {
    const name = this.current;
    this.show(null);
    if (name) byId(`open-${name}`).focus();
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
