// Light, dark, or as the system has it.

import { byId } from "./dom.js";
import { text as say, whenTranslated } from "./language.js";
import { forGood } from "./store.js";

const THEMES = [null, "light", "dark"];
const NAMES = { light: "themeLight", dark: "themeDark" };

export function offerThemes() {
  const button = byId("theme");
  let theme = forGood.get("theme");
  const show = () => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.title = say(NAMES[theme] ?? "themeAuto");
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    forGood.set("theme", theme);
    show();
  });
  whenTranslated(show);
}
