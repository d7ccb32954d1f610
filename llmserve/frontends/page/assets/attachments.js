// Text files that go along with a message.

import { byId, element } from "./dom.js";
import { number, text as say } from "./language.js";

const MOST_FILES = 10;
const MOST_KB = 500;

export class Attachments {
  constructor() {
    this.files = [];
    const composer = byId("composer");
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", async ({ target }) => {
      await this.add([...target.files]);
      target.value = "";
    });
    composer.addEventListener("dragover", (event) => event.preventDefault());
    composer.addEventListener("drop", (event) => this.addFrom(event, event.dataTransfer));
    composer.addEventListener("paste", (event) => this.addFrom(event, event.clipboardData));
  }

  addFrom(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.add([...files]);
  }

  async add(files) {
    const problems = [];
    for (const file of files) {
      const text = await textOf(file);
      if (text === null || this.files.length >= MOST_FILES) problems.push(say("badFile", { name: file.name, most: number(MOST_KB), count: MOST_FILES }));
      else this.files.push({ name: file.name, text });
    }
    this.show(problems.join(" "));
    byId("message").focus();
  }

  /** What was there is sent. */
  take() {
    const { files } = this;
    this.set([]);
    return files;
  }

  set(files) {
    this.files = files;
    this.show("");
  }

  show(problem) {
    const chips = this.files.map((file) => element(
      "button",
      { type: "button", className: "badge", title: say("remove"), onclick: () => this.set(this.files.filter((each) => each !== file)) },
      `${file.name} ×`,
    ));
    byId("files").replaceChildren(...chips, problem);
  }
}

/** Null of what is too large, or no text. */
async function textOf(file) {
  if (file.size > MOST_KB * 1000) return null;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}
