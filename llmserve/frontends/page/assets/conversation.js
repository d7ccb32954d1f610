// The conversation on the page: its messages, the answer that is under way, and its other versions. One answer at a time.

import { canGoOn, newAnswer, receive, restart } from "./answer.js";
import { archive, newConversation, pathOf, show, siblings } from "./archive.js";
import { byId, frameScheduler } from "./dom.js";
import { text as say, whenTranslated } from "./language.js";
import { MessageView, spokenText } from "./message_view.js";
import { forThisTab } from "./store.js";

const NEAR_PX = 80; // the end of the conversation is followed from here
const SAID = { done: "saidDone", stopped: "saidStopped" };

export class Conversation {
  /** `request()` is what is asked, but for the messages; null when it cannot be. `ended(answer)`, `kept(isKept)`. */
  constructor({ request, systemPrompt, ended, busy, kept }) {
    Object.assign(this, { request, systemPrompt, ended, busy, kept });
    this.data = archive.get(forThisTab.get("chat")) ?? newConversation();
    this.views = [];
    this.abort = null; // of the answer that is under way
    this.inFrame = frameScheduler();
    this.log = byId("log");
    this.scroller = byId("scroller");
    this.actions = {
      again: (message) => this.again(message),
      edit: (message, text) => this.edit(message, text),
      goOn: (message) => this.goOn(message),
      canGoOn: (message) => !this.isBusy && message === this.messages.at(-1) && canGoOn(message),
      versions: (message) => siblings(this.data, message),
      choose: (message) => this.choose(message),
    };
    addEventListener("pagehide", () => this.isBusy && this.keep());
    whenTranslated(() => this.views.forEach((view) => view.redraw()));
    this.showPath();
    this.toEnd();
  }

  get messages() {
    return this.views.map((view) => view.message);
  }

  get isBusy() {
    return this.abort !== null;
  }

  /** Another one, or a new one. */
  open(data = newConversation()) {
    this.stop();
    this.data = data;
    forThisTab.set("chat", data.id);
    this.showPath();
    this.toEnd();
  }

  /** Whether it was sent. */
  async send(text, files = []) {
    const request = this.isBusy ? null : this.request();
    if (!request) return false;
    this.append({ role: "user", content: text, files });
    await this.answer(request);
    return true;
  }

  /** Another answer beside `message`, or beside the last one. One without a word makes room. */
  async again(message = this.messages.at(-1)) {
    const request = message && !this.isBusy ? this.request() : null;
    if (!request) return;
    const at = this.messages.indexOf(message);
    this.cut(message.role === "user" ? at + 1 : at);
    if (message.role !== "user" && !message.content && message === this.data.messages.at(-1)) this.data.messages.pop();
    await this.answer(request);
  }

  /** A question in other words; the former ones are another version. */
  async edit(message, text) {
    const request = this.isBusy ? null : this.request();
    if (!request) return;
    this.cut(this.messages.indexOf(message));
    this.append({ role: "user", content: text, files: message.files });
    await this.answer(request);
  }

  /** More of the last answer. A form of answers is one of whole answers, so it is not asked for. */
  async goOn(message) {
    const request = this.isBusy ? null : this.request();
    if (!request) return;
    for (const name of ["response_format", "structured_outputs", ...(message.tokens ? [] : ["logprobs", "top_logprobs"])]) delete request[name];
    await this.answer(request, message);
  }

  /** It is deleted. */
  forget() {
    this.data.isGone = true;
    this.open();
  }

  choose(message) {
    if (this.isBusy) return;
    show(this.data, message);
    this.keep();
    this.showPath();
  }

  editLast() {
    if (!this.isBusy) this.views.findLast((view) => view.message.role === "user")?.edit();
  }

  /** The server frees what it has for the answer. */
  stop() {
    this.abort?.abort();
  }

  async answer(request, begun = null) {
    const messages = this.spoken();
    const answer = begun ?? newAnswer(request);
    const view = begun ? this.views.at(-1) : this.append(answer);
    restart(answer);
    const { data } = this;
    const abort = new AbortController();
    this.abort = abort;
    this.keep();
    this.busy(true);
    this.toEnd();
    const update = () => this.followed(() => view.update());
    update();
    await receive(answer, { ...request, messages }, { signal: abort.signal, changed: () => this.inFrame(update) });
    if (this.abort === abort) {
      this.abort = null;
      this.busy(false);
      update();
    }
    this.keep(data);
    byId("announcer").textContent = say(SAID[answer.state] ?? "saidFailed");
    this.ended(answer);
  }

  /** As the server takes them. Answers without a word are left out. */
  spoken() {
    const system = this.systemPrompt();
    const said = this.messages.map((message) => ({ role: message.role, content: spokenText(message) })).filter(({ content }) => content);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  append(message) {
    const { messages } = this.data;
    const before = this.views.at(-1);
    messages.push(Object.assign(message, { parent: before ? messages.indexOf(before.message) : -1 }));
    show(this.data, message);
    const view = this.addView(message);
    before?.update(); // it is the last no more
    return view;
  }

  addView(message) {
    const view = new MessageView(message, this.actions);
    this.views.push(view);
    this.log.append(view.element);
    this.showWelcome();
    return view;
  }

  showPath() {
    const path = pathOf(this.data);
    const same = path.findIndex((message, index) => message !== this.views[index]?.message);
    this.cut(same < 0 ? path.length : same);
    for (const message of path.slice(this.views.length)) this.addView(message);
    this.views.at(-1)?.update();
  }

  cut(length) {
    for (const view of this.views.splice(length)) view.element.remove();
    this.showWelcome();
  }

  keep(data = this.data) {
    if (data.isGone) return;
    data.changed = Date.now();
    forThisTab.set("chat", this.data.id);
    this.kept(archive.set(data));
  }

  showWelcome() {
    byId("welcome").hidden = this.views.length > 0;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** What is below the end stays in sight, unless somebody has scrolled up to read. */
  followed(change) {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    change();
    if (isNear) this.toEnd();
  }
}
