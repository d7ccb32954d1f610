// The list of conversations that this browser keeps: to open, find, rename, delete, and to carry elsewhere.

import { archive, conversationsOf, fileText, MOST_FILE_BYTES, titleOf } from "./archive.js";
import { askFor } from "./ask_dialog.js";
import { byId, element, iconButton, saveAs } from "./dom.js";
import { dateTime, number, text as say, whenTranslated } from "./language.js";

const MOST_SHOWN = 200;

export class Library {
  /** `open(conversation)`; without one a new one. */
  constructor(conversation, open) {
    this.conversation = conversation;
    this.open = open;
    this.panel = byId("chats");
    this.list = byId("chat-list");
    byId("chat-search").addEventListener("input", () => this.show());
    byId("chat-export").addEventListener("click", () => saveAs("llmserve-conversations.json", fileText(archive.all())));
    byId("chat-import").addEventListener("click", () => byId("chat-file").click());
    byId("chat-file").addEventListener("change", ({ target }) => this.read(target));
    byId("chat-delete").addEventListener("click", () => this.remove(archive.all(), say("deleteAll")));
    archive.watch((id) => this.changedElsewhere(id));
    whenTranslated(() => this.show());
  }

  /** Those with the words that are looked for. */
  show() {
    if (this.panel.hidden) return;
    const words = byId("chat-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = archive.all();
    const found = all.filter((each) => {
      const content = [titleOf(each), ...each.messages.map((message) => message.content)].join("\n").toLowerCase();
      return words.every((word) => content.includes(word));
    });
    const items = found.slice(0, MOST_SHOWN).map((each) => this.item(each));
    const empty = say(all.length ? "noneFound" : "noneKept");
    this.list.replaceChildren(...(items.length ? items : [element("li", { className: "none" }, empty)]));
    byId("chat-export").disabled = byId("chat-delete").disabled = !all.length;
  }

  item(each) {
    const title = titleOf(each);
    const isCurrent = each.id === this.conversation.data.id;
    const open = element(
      "button", { type: "button", className: "open", title, onclick: () => isCurrent || this.open(archive.get(each.id)) },
      element("span", {}, title), element("small", {}, dateTime(each.changed)),
    );
    if (isCurrent) open.setAttribute("aria-current", "true");
    const acts = element(
      "span", { className: "acts" },
      iconButton("edit", say("rename"), () => this.rename(each, title)),
      iconButton("save", say("exportOne"), () => saveAs("llmserve-conversation.json", fileText([each]))),
      iconButton("delete", say("remove"), () => this.remove([each], title)),
    );
    return element("li", {}, open, acts);
  }

  async rename(each, title) {
    const name = await askFor(say("rename"), { value: title });
    if (!name) return;
    const current = this.conversation.data;
    const renamed = each.id === current.id ? current : (archive.get(each.id) ?? each);
    renamed.title = name;
    archive.set(renamed);
    this.show();
  }

  async remove(those, title) {
    if ((await askFor(say("removeTitle"), { reason: title })) === null) return;
    for (const { id } of those) {
      archive.remove(id);
      if (id === this.conversation.data.id) this.conversation.forget();
    }
    this.show();
  }

  async read(input) {
    const [file] = input.files;
    input.value = "";
    const notice = byId("chat-notice");
    try {
      if (file.size > MOST_FILE_BYTES) throw new Error(say("tooLarge", { name: file.name, most: number(MOST_FILE_BYTES / 1e6) }));
      const read = conversationsOf(await file.text());
      const kept = read.filter((each) => archive.set(each)).length;
      notice.textContent = say(kept < read.length ? "importFull" : "imported", { count: number(kept), all: number(read.length) });
    } catch (error) {
      notice.textContent = say("importBad", { problem: error.message.slice(0, 300) });
    }
    notice.hidden = false;
    this.show();
  }

  /** What is open here follows, unless an answer is coming. */
  changedElsewhere(id) {
    const { conversation } = this;
    const changed = id === conversation.data.id && !conversation.isBusy ? archive.get(id) : null;
    if (changed) conversation.open(changed);
    this.show();
  }
}
