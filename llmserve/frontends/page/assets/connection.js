// Whether the server can be asked: its health, and the models that it has. "ready" is said when a message can be sent.

import { health, modelNames, Refused } from "./api.js";
import { byId, element } from "./dom.js";
import { askForKey } from "./key_dialog.js";
import { text as say, whenTranslated } from "./language.js";
import { forThisTab } from "./store.js";

const TEXTS = { ready: "healthReady", loading: "healthLoading", gone: "healthGone", locked: "healthLocked", empty: "healthEmpty" };
const INTERVAL_MS = 1000;
const READY_INTERVAL_MS = 5000;
const UNAUTHORIZED = 401;

export class Connection {
  /** `chosen(model)` is called with each model that is chosen, and after the server has been away. */
  constructor(chosen) {
    this.chosen = chosen;
    this.state = "loading";
    this.models = byId("model");
    this.models.addEventListener("change", () => {
      forThisTab.set("model", this.model);
      chosen(this.model);
    });
    whenTranslated(() => this.show());
    this.watch();
  }

  get model() {
    return this.models.value;
  }

  async watch() {
    if (document.visibilityState === "visible") await this.check();
    setTimeout(() => this.watch(), this.state === "ready" ? READY_INTERVAL_MS : INTERVAL_MS);
  }

  async check() {
    const found = await health();
    if (found !== "ready") this.set(found);
    else if (!["ready", "locked"].includes(this.state)) await this.loadModels();
  }

  async loadModels() {
    try {
      this.showModels(await modelNames());
    } catch (error) {
      if (!(error instanceof Refused)) {
        this.set("gone");
        return;
      }
      this.showModels([]);
      if (error.status === UNAUTHORIZED) this.lock(error.message);
    }
  }

  showModels(names) {
    const wanted = this.model || forThisTab.get("model");
    this.models.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    this.models.value = names.includes(wanted) ? wanted : (names[0] ?? "");
    this.models.disabled = !names.length;
    byId("send").disabled = !names.length;
    this.set(names.length ? "ready" : "empty");
    if (this.model) this.chosen(this.model);
  }

  lock(reason) {
    this.set("locked");
    askForKey(reason);
  }

  /** An answer that failed says more than the last time that its health was asked. */
  heard(answer) {
    if (answer.status === UNAUTHORIZED) this.lock(answer.problem);
    if (answer.state === "lost") this.check();
  }

  set(state) {
    this.state = state;
    this.show();
  }

  show() {
    byId("health").dataset.state = this.state;
    const says = say(TEXTS[this.state]);
    const node = byId("health-text");
    if (node.textContent !== says) node.textContent = says;
    node.toggleAttribute("data-says", this.state !== "ready");
  }
}
