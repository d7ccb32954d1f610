// System prompts with names, which the browser keeps.

import { askFor } from "./ask_dialog.js";
import { byId, element } from "./dom.js";
import { text as say, whenTranslated } from "./language.js";
import { forGood } from "./store.js";

export class SystemPrompts {
  constructor(settings) {
    this.settings = settings;
    this.choice = byId("prompts");
    this.field = settings.fields.system;
    this.choice.addEventListener("change", () => this.use(this.prompts.get(this.choice.value) ?? ""));
    this.field.addEventListener("input", () => this.show());
    byId("prompt-save").addEventListener("click", () => this.save());
    byId("prompt-delete").addEventListener("click", () => this.remove());
    whenTranslated(() => this.show());
  }

  /** By name. */
  get prompts() {
    const kept = Object.entries(forGood.get("prompts", {}) ?? {});
    return new Map(kept.filter(([, text]) => typeof text === "string"));
  }

  /** The name of what is in the field. */
  get current() {
    return [...this.prompts].find(([, text]) => text === this.field.value)?.[0] ?? "";
  }

  use(text) {
    this.field.value = text;
    this.settings.changed();
    this.show();
  }

  async save() {
    const name = await askFor(say("promptName"), { value: this.current });
    if (!name) return;
    forGood.set("prompts", Object.fromEntries(this.prompts.set(name, this.field.value)));
    this.show();
  }

  async remove() {
    const { prompts, current } = this;
    if ((await askFor(say("removeTitle"), { reason: current })) === null) return;
    prompts.delete(current);
    forGood.set("prompts", Object.fromEntries(prompts));
    this.use("");
  }

  show() {
    const names = [...this.prompts.keys()].sort();
    this.choice.replaceChildren(...["", ...names].map((name) => element("option", { value: name }, name || say("noPrompt"))));
    this.choice.value = this.current;
    byId("prompt-delete").disabled = !this.current;
    byId("prompt-save").disabled = !this.field.value.trim();
  }
}
