// Conversations as they are kept, in the browser and in files. Each is a tree: a message's `parent` is the place of the
// one before it (-1: none), and `isShown` says which of several is on the page. What is read may be anybody's: only
// known fields are taken, each of its type and size.

import { newAnswer, UNDER_WAY } from "./answer.js";

const PREFIX = "llmserve.chat.";
const FORMAT = "llmserve conversations";
export const MOST_FILE_BYTES = 20_000_000;
const MOST_CONVERSATIONS = 2_000;
const MOST_MESSAGES = 2_000;
const MOST_CHARACTERS = 2_000_000;
const MOST_FILES = 20;
const TITLE_LENGTH = 60;

const text = (value) => typeof value === "string" && value.length <= MOST_CHARACTERS;
const flag = (value) => typeof value === "boolean";
const number = (value) => Number.isFinite(value) && value >= 0;
const maybe = (check) => (value) => value === null || check(value);
const oneOf = (...values) => (value) => values.includes(value);
const CONVERSATION = { title: text, changed: number };
const MESSAGE = {
  role: oneOf("user", "assistant"), content: text, parent: Number.isInteger, isShown: flag, thoughts: text, isPlain: flag,
  pieces: number, state: oneOf("done", "stopped", "refused", "lost", ...UNDER_WAY), problem: text, status: number,
  retryAfter: maybe(number), finish: text, warning: text, firstAfter: maybe(number), lastAfter: maybe(number),
};
const USAGE = {
  prompt_tokens: number, completion_tokens: number, cached_tokens: number, drafted_tokens: number, accepted_tokens: number,
};
const UNCOUNTED = { cached_tokens: 0, drafted_tokens: 0, accepted_tokens: 0 };
const FILE = { name: text, text };

/** The known fields of `value`; `place` is told where one is not as it has to be. */
function taken(value, fields, place) {
  if (value === null || typeof value !== "object") throw new Error(`${place} is not an object`);
  const found = Object.entries(fields).filter(([name]) => Object.hasOwn(value, name));
  for (const [name, check] of found) if (!check(value[name])) throw new Error(`${place}.${name}`);
  return Object.fromEntries(found.map(([name]) => [name, value[name]]));
}

function list(value, most, place) {
  if (!Array.isArray(value) || value.length > most) throw new Error(`${place} is not a list of at most ${most}`);
  return value;
}

function messageOf(value, index, place) {
  const message = { content: "", isShown: true, parent: index - 1, ...taken(value, MESSAGE, place) };
  if (message.parent < -1 || message.parent >= index) throw new Error(`${place}.parent`);
  if (message.role === "user") {
    const files = list(value.files ?? [], MOST_FILES, `${place}.files`);
    return { ...message, files: files.map((file) => ({ name: "", text: "", ...taken(file, FILE, `${place}.files`) })) };
  }
  if (message.role !== "assistant") throw new Error(`${place}.role`);
  if (UNDER_WAY.includes(message.state)) message.state = "stopped"; // when the page was left
  const usage = value.usage ? { ...UNCOUNTED, ...taken(value.usage, USAGE, `${place}.usage`) } : null;
  return { ...newAnswer({}), state: "done", ...message, usage };
}

function conversationOf(value, place = "conversation") {
  const made = { title: "", changed: Date.now(), ...taken(value, CONVERSATION, place) };
  const messages = list(value.messages, MOST_MESSAGES, `${place}.messages`);
  return { ...made, messages: messages.map((each, index) => messageOf(each, index, `${place}.messages[${index}]`)) };
}

/** Of a file's text. Throws an error that names what is wrong. */
export function conversationsOf(content) {
  const value = JSON.parse(content);
  if (value?.format !== FORMAT) throw new Error(`"format" is not "${FORMAT}"`);
  return list(value.conversations, MOST_CONVERSATIONS, "conversations").map((each, index) => ({
    ...conversationOf(each, `conversations[${index}]`), id: newId(),
  }));
}

export function fileText(conversations) {
  const kept = conversations.map(({ id, ...conversation }) => conversation);
  return JSON.stringify({ format: FORMAT, conversations: kept }, withoutTokens, 1);
}

/** Probabilities take many times the room of the text. */
const withoutTokens = (name, value) => (name === "tokens" ? undefined : value);

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2);

export const newConversation = () => ({ id: newId(), title: "", changed: Date.now(), messages: [] });

/** What a conversation is called until somebody gives it a name. */
export function titleOf({ title, messages }) {
  const [first] = messages;
  return title || (first ? (first.content || first.files?.[0]?.name || "").trim().split("\n")[0].slice(0, TITLE_LENGTH) : "");
}

/** The messages that are on the page. */
export function pathOf({ messages }) {
  const path = [];
  for (let parent = -1; ; ) {
    const follows = (message) => message.parent === parent;
    let at = messages.findLastIndex((message) => follows(message) && message.isShown);
    if (at < 0) at = messages.findLastIndex(follows);
    if (at < 0) return path;
    path.push(messages[at]);
    parent = at;
  }
}

export const siblings = ({ messages }, { parent }) => messages.filter((each) => each.parent === parent);

export function show(conversation, message) {
  for (const each of siblings(conversation, message)) each.isShown = each === message;
}

/** The browser's own; empty where it keeps nothing. */
export const archive = {
  all() {
    try {
      const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
      return ids.map((id) => this.get(id)).filter(Boolean).sort((a, b) => b.changed - a.changed);
    } catch {
      return [];
    }
  },
  get(id) {
    try {
      return { ...conversationOf(JSON.parse(localStorage.getItem(PREFIX + id))), id };
    } catch {
      return null; // none, or something else under that name
    }
  },
  /** Whether there was room. */
  set(conversation) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation, withoutTokens));
      return true;
    } catch {
      return false;
    }
  },
  remove(id) {
    try {
      localStorage.removeItem(PREFIX + id);
    } catch {
      // it keeps nothing
    }
  },
  /** `changed(id)`: another tab has. */
  watch(changed) {
    addEventListener("storage", ({ key }) => key?.startsWith(PREFIX) && changed(key.slice(PREFIX.length)));
  },
};
