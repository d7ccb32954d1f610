// Calls of a client in JavaScript (@grpc/grpc-js, and Node's HTTP/2 below it), one line of the result each.
"use strict";

const assert = require("node:assert");
const fs = require("node:fs");
const http2 = require("node:http2");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [descriptors, address, ...chosen] = process.argv.slice(2);
const definition = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(descriptors), { keepCase: true, longs: Number });
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const CREDENTIALS = process.env.ROOT
  ? grpc.credentials.createSsl(fs.readFileSync(process.env.ROOT))
  : grpc.credentials.createInsecure();
const OPTIONS = { "grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1 };

const connect = (options = {}) =>
  new GRPCInferenceService(address, CREDENTIALS, { ...OPTIONS, ...options });

// One unary call, as a promise of the reply.
function call(client, method, request, { metadata = new grpc.Metadata(), ...options } = {}) {
  return new Promise((resolve, reject) =>
    client[method](request, metadata, options, (error, reply) => (error ? reject(error) : resolve(reply))));
}

const echo = (data, model = "echo") => ({
  model_name: model,
  inputs: [{ name: "IN", datatype: "UINT8", shape: [data.length] }],
  raw_input_contents: [data],
});

function repeat(id, values, delayMs = 0) {
  const [numbers, delays] = [Buffer.from(Int32Array.from(values).buffer), Buffer.from(new Uint32Array(values.length).fill(delayMs).buffer)];
  return {
    model_name: "repeat",
    id,
    inputs: [
      { name: "IN", datatype: "INT32", shape: [values.length] },
      { name: "DELAY", datatype: "UINT32", shape: [values.length] },
      { name: "WAIT", datatype: "UINT32", shape: [1] },
    ],
    raw_input_contents: [numbers, delays, Buffer.alloc(4)],
  };
}

function random(size) {
  const data = Buffer.alloc(size);
  for (let i = 0, state = 1; i < size; i++) data[i] = (state = (state * 48271) % 2147483647) & 0xff;
  return data;
}

async function failure(promise) {
  const error = await promise.then(() => assert.fail("the call did not fail"), (reason) => reason);
  assert(error.code !== undefined, error);
  return [error.code, error.details];
}

async function echoes(client, data, options) {
  const reply = await call(client, "ModelInfer", echo(data), options);
  assert(data.equals(reply.raw_output_contents[0]), "other data came back");
}

// Every message of a stream, once it has ended well.
function collect(stream) {
  return new Promise((resolve, reject) => {
    const received = [];
    stream.on("data", (message) => received.push(message));
    stream.on("error", reject);
    stream.on("end", () => resolve(received));
  });
}

const SCENARIOS = {
  async unary(client) {
    assert.deepStrictEqual(await call(client, "ServerReady", {}), { ready: true });
    for (const size of [0, 1, 1000]) await echoes(client, random(size));
  },

  async large(client) {
    await echoes(client, random(12 * 1024 * 1024));
    await Promise.all([1, 2, 3].map((n) => echoes(client, random(n * 3_000_000))));
  },

  async many(client) {
    await Promise.all(Array.from({ length: 500 }, (_, n) => echoes(client, random(n))));
  },

  async stream(client) {
    const stream = client.ModelStreamInfer();
    const all = collect(stream);
    const [requests, responses] = [100, 20];
    for (let n = 0; n < requests; n++) stream.write(repeat(`r${n}`, Array.from({ length: responses }, (_, i) => n + i), 1));
    stream.end();
    const received = await all;
    assert.strictEqual(received.length, requests * responses);
    for (let n = 0; n < requests; n++) {
      const own = received.filter(({ infer_response }) => infer_response.id === `r${n}`);
      const values = own.map(({ infer_response }) => infer_response.raw_output_contents[0].readInt32LE());
      assert.deepStrictEqual(values, Array.from({ length: responses }, (_, i) => n + i));
    }
  },

  async stream_error(client) {
    const stream = client.ModelStreamInfer();
    const all = collect(stream);
    stream.write({ model_name: "nope", id: "bad" });
    stream.write(repeat("good", [7]));
    stream.end();
    const received = await all;
    assert.deepStrictEqual(received.map(({ error_message }) => /unknown model/.test(error_message)).sort(), [false, true]);
  },

  async cancel(client) {
    const stream = client.ModelStreamInfer();
    const ended = failure(collect(stream));
    stream.write(repeat("endless", new Array(10_000).fill(1), 5));
    stream.once("data", () => stream.cancel());
    assert.strictEqual((await ended)[0], grpc.status.CANCELLED);
    const unary = client.ModelInfer(echo(random(1), "slow"), () => {});
    setTimeout(() => unary.cancel(), 50);
    await new Promise((resolve) => unary.on("status", ({ code }) => resolve(assert.strictEqual(code, grpc.status.CANCELLED))));
    await echoes(client, random(10));
  },

  async deadline(client) {
    const late = call(client, "ModelInfer", echo(random(1), "slow"), { deadline: Date.now() + 200 });
    assert.strictEqual((await failure(late))[0], grpc.status.DEADLINE_EXCEEDED);
    await echoes(client, random(10), { deadline: Date.now() + 20_000 });
  },

  async metadata(client) {
    const metadata = new grpc.Metadata();
    metadata.set("x-text", "some text");
    metadata.set("x-data-bin", Buffer.from("binary \u00fc"));
    const { raw_output_contents } = await call(client, "ModelInfer", { ...echo(random(1)), model_name: "describe" }, { metadata });
    const seen = JSON.parse(raw_output_contents[0].subarray(4));
    assert.deepStrictEqual(seen, { "x-text": "some text", "x-data-bin": "binary \u00fc" });
  },

  async error(client) {
    const [code, details] = await failure(call(client, "ModelInfer", { model_name: "100% \u00fc\n\u6f22" }));
    assert.strictEqual(code, grpc.status.NOT_FOUND);
    assert.match(details, /'100% \u00fc\n\u6f22' is not found/);
    const unknown = new grpc.Client(address, CREDENTIALS);
    const bytes = (value) => value;
    const missing = new Promise((resolve) =>
      unknown.makeUnaryRequest("/inference.GRPCInferenceService/Nope", bytes, bytes, Buffer.alloc(9), resolve));
    assert.strictEqual((await missing).code, grpc.status.UNIMPLEMENTED);
    unknown.close();
  },

  async gzip() {
    const client = connect({ "grpc.default_compression_algorithm": 2 });
    await echoes(client, Buffer.alloc(1_000_000));
    await echoes(client, random(100_000));
    client.close();
  },

  async keepalive() {
    const client = connect({ "grpc.keepalive_time_ms": 50, "grpc.keepalive_timeout_ms": 1000, "grpc.keepalive_permit_without_calls": 1 });
    const stream = client.ModelStreamInfer();
    const all = collect(stream);
    stream.write(repeat("long", [1, 2, 3], 300));
    stream.end();
    assert.strictEqual((await all).length, 3);
    client.close();
  },

  async settings() {
    const strict = { headerTableSize: 0, initialWindowSize: 7, maxFrameSize: 16384, maxHeaderListSize: 1000 };
    const session = http2.connect(`http://${address}`, { settings: strict });
    for (let round = 0; round < 3; round++) {
      const stream = session.request({
        ":method": "POST", ":path": "/inference.GRPCInferenceService/ServerMetadata",
        "content-type": "application/grpc", te: "trailers", "x-round": "many letters".repeat(500 * round),
      }, { weight: 200 });
      const trailers = new Promise((resolve, reject) => stream.on("trailers", resolve).on("error", reject));
      stream.end(Buffer.alloc(5));
      const received = [];
      for await (const piece of stream) received.push(piece);
      assert.strictEqual((await trailers)["grpc-status"], "0");
      assert.match(Buffer.concat(received).toString(), /llmserve/);
      session.settings({ ...strict, headerTableSize: 100 * round, initialWindowSize: 7 + round });
    }
    await new Promise((resolve) => session.close(resolve));
  },

  // The test stops the server and starts another one when this says so.
  async restart(client) {
    const codes = new Set();
    let running = true;
    const load = Promise.all(Array.from({ length: 8 }, async () => {
      while (running) {
        await call(client, "ModelInfer", echo(random(100))).then(() => codes.add(0), ({ code }) => codes.add(code));
        await new Promise((resolve) => setTimeout(resolve, 5));
      }
    }));
    console.log("go");
    await new Promise((resolve) => process.stdin.once("data", resolve).once("end", resolve));
    running = false;
    await load;
    codes.delete(grpc.status.OK);
    codes.delete(grpc.status.UNAVAILABLE);
    assert.deepStrictEqual([...codes], []);
    await call(client, "ServerReady", {}, { deadline: Date.now() + 30_000, metadata: waiting() });
  },
};

function waiting() {
  const metadata = new grpc.Metadata();
  metadata.setOptions({ waitForReady: true });
  return metadata;
}

async function main() {
  const client = connect();
  for (const name of chosen) {
    try {
      await SCENARIOS[name](client);
      console.log(`ok ${name}`);
    } catch (error) {
      console.log(`failed ${name}: ${error.stack}`);
    }
  }
  client.close();
  process.stdin.destroy();
}

main();
