// Which engine answers, and how it does: facts, and charts of what `/metrics` says, as long as somebody looks.

import { metricsText, partsOf, Refused } from "./api.js";
import { Chart } from "./chart.js";
import { byId, copyText, element } from "./dom.js";
import { language, number, text as say, whenTranslated } from "./language.js";
import { duration } from "./message_view.js";
import { chosen, grown, observed, parseMetrics, total } from "./metrics.js";

const INTERVAL_MS = 1000;
const SIZE = 120; // readings that a chart shows
const WINDOW = 15; // readings between which latencies are taken
const TOKENS_INTERVAL = 3; // and rates of tokens
const QUANTILE = 0.95;
const SHORT_DIGEST = 12;
const HEADER_DIGEST = 8;

export class ServerPanel {
  constructor() {
    this.panel = byId("server");
    this.parts = [];
    this.info = null;
    this.gates = [];
    this.readings = [];
    const seconds = (value) => duration(value * 1000);
    const size = SIZE;
    this.charts = {
      throughput: new Chart("throughput", ["written", "read"], (value) => number(value, value < 10 ? 1 : 0), { size }),
      first: new Chart("firstToken", ["mean", "slowest"], seconds, { size }),
      between: new Chart("betweenTokens", ["mean", "slowest"], seconds, { size }),
      batch: new Chart("batch", ["running", "waiting"], (value) => number(value), { size }),
      cache: new Chart("cache", ["used"], (value) => `${number(value * 100, 1)} %`, { size, top: 1 }),
    };
    byId("charts").append(...Object.values(this.charts).map((chart) => chart.element));
    setInterval(() => this.read(), INTERVAL_MS);
    whenTranslated(() => {
      this.showFacts();
      for (const chart of Object.values(this.charts)) chart.draw();
    });
  }

  /** Another model: its engine, from now on. */
  async setModel(model) {
    this.readings = [];
    for (const chart of Object.values(this.charts)) chart.clear();
    this.parts = [model];
    try {
      this.parts = await partsOf(model);
    } catch {
      // configs may be restricted: then the model itself has to do
    }
    await this.read({ isAsked: true });
  }

  /** Nothing is asked while nobody looks, but once for the engine's name. */
  async read({ isAsked = false } = {}) {
    const isSeen = !this.panel.hidden && document.visibilityState === "visible";
    if (!this.parts.length || this.isReading || !(isSeen || isAsked)) return;
    this.isReading = true;
    try {
      const samples = parseMetrics(await metricsText());
      this.add({ samples, at: performance.now() });
      this.say("");
    } catch (error) {
      this.readings = [];
      this.say(error instanceof Refused ? say("refused", { problem: error.message }) : say("lostAtOnce"));
    } finally {
      this.isReading = false;
    }
  }

  say(problem) {
    const notice = byId("server-notice");
    notice.hidden = !problem;
    notice.textContent = problem;
  }

  add(reading) {
    const { samples } = reading;
    this.info = chosen(samples, "llmserve_engine_info", this.parts)[0]?.labels ?? null;
    this.gates = chosen(samples, "llmserve_engine_gate", this.parts);
    this.showFacts();
    this.readings.push(reading);
    if (this.readings.length > WINDOW + 1) this.readings.shift();
    const since = this.readings[0];
    if (since === reading) return;
    const { charts, parts } = this;
    charts.throughput.add(this.rates());
    for (const [chart, name] of [
      [charts.first, "llmserve_time_to_first_token_seconds"],
      [charts.between, "llmserve_time_per_output_token_seconds"],
    ]) {
      const found = observed(since.samples, samples, name, parts, QUANTILE);
      chart.add([found?.mean ?? null, found?.quantile ?? null]);
    }
    const requests = (type) => total(samples, "nv_trt_llm_request_metrics", parts, { request_type: type });
    const [active, waiting] = [requests("active"), requests("waiting")];
    charts.batch.add([active === null ? null : active - waiting, waiting]);
    charts.cache.add([total(samples, "nv_trt_llm_kv_cache_block_metrics", parts, { kv_cache_block_type: "fraction" })]);
  }

  /** Tokens a second, written and read. */
  rates() {
    const last = this.readings.at(-1);
    const first = this.readings.at(-1 - TOKENS_INTERVAL) ?? this.readings[0];
    const seconds = (last.at - first.at) / 1000;
    return ["llmserve_generation_tokens_total", "llmserve_prompt_tokens_total"].map((name) => {
      const count = grown(first.samples, last.samples, name, this.parts);
      return count === null ? null : count / seconds;
    });
  }

  /** Made anew when something has changed: one of them can have the focus. */
  showFacts() {
    const { info } = this;
    const shown = JSON.stringify([language(), info, this.gates, this.parts.length, byId("model").length]);
    if (shown === this.shown) return;
    this.shown = shown;
    const name = byId("engine-name");
    name.hidden = !info;
    if (info) name.replaceChildren(element("span", {}, info.name), " ", element("code", {}, info.digest.slice(0, HEADER_DIGEST)));
    name.title = info ? `${say("engine")}: ${info.name}, ${info.digest}` : "";
    document.querySelector(".model").hidden = info !== null && byId("model").length < 2;
    byId("welcome-engine").textContent = info ? [info.name, info.dtype, info.target].join(" · ") : "";
    const rows = info ? this.rows() : [["", say("noEngine")]];
    byId("facts").replaceChildren(
      ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
    );
    byId("facts").hidden = !this.parts.length;
  }

  rows() {
    const { info } = this;
    const digest = element("button", { type: "button", className: "link", title: info.digest }, element("code", {}, info.digest.slice(0, SHORT_DIGEST)));
    digest.addEventListener("click", () => copyText(info.digest));
    digest.setAttribute("aria-label", `${say("copy")}: ${info.digest}`);
    const limits = { length: number(Number(info.max_seq_len)), batch: number(Number(info.max_batch_size)) };
    return [
      [say("engine"), info.name],
      [say("architecture"), info.architecture],
      [say("dtype"), info.dtype],
      [say("target"), info.target],
      [say("digest"), digest],
      [say("limits"), say("limitsText", limits)],
      ...this.gates.map(({ labels, value }) => [say("gate"), gateWords(labels.suite, value === 1)]),
    ];
  }
}

function gateWords(suite, passed) {
  return element("span", { className: passed ? "passed" : "failed" }, say(passed ? "gatePassed" : "gateFailed", { suite }));
}
