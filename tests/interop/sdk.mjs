// The published TypeScript SDK drives a real crow through every stable method, and its unstable client through unstable ones.
// CROW is the command and CROW_OPTIONS the options of `crow acp`, each as a JSON list. With CROW_SERVE=1 all tests connect to
// one `crow serve` instead, with the SDK's own WebSocket client. The offline model does what its prompts say, so that no
// endpoint is needed.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtempSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Readable, Writable } from "node:stream";
import { after, before, test } from "node:test";
import { createInterface } from "node:readline";
import * as acp from "@agentclientprotocol/sdk";
import { createWebSocketStream } from "@agentclientprotocol/sdk/experimental/ws-client";
import * as unstable from "@agentclientprotocol/sdk/unstable";
import { WebSocket } from "ws";

const command = JSON.parse(process.env.CROW);
const options = JSON.parse(process.env.CROW_OPTIONS ?? "[]");
const root = mkdtempSync(join(tmpdir(), "crow-interop-"));
const cwd = join(root, "work");
const home = join(root, "home");
const limits = { timeout: 300_000 };
const environment = { PATH: process.env.PATH, PYTHONPATH: process.env.PYTHONPATH ?? "", CROW_HOME: home, CROW_MODEL: "offline" };
let server;

before(async () => {
  mkdirSync(cwd);
  mkdirSync(home);
  writeFileSync(join(cwd, "README.md"), "# Nest\nTwigs and string.\n");
  writeFileSync(join(home, "config.toml"), "[editor]\nterminals = true\n");
  if (process.env.CROW_SERVE) server = await startServer();
});
after(async () => {
  if (server) {
    server.child.kill("SIGTERM");
    assert.equal(await server.exit, 0);
    assert.deepEqual(server.errors, []);
  }
  rmSync(root, { recursive: true, force: true });
});

/** Starts `crow serve` on a free port; its log tells which. */
async function startServer() {
  const argv = [...command.slice(1), "serve", "--listen", "127.0.0.1:0", ...options];
  const child = spawn(command[0], argv, { cwd, env: environment, stdio: ["ignore", "ignore", "pipe"] });
  const started = { child, errors: [], exit: new Promise((resolve) => child.on("close", resolve)) };
  started.address = await new Promise((resolve, reject) => {
    child.on("close", () => reject(new Error(`crow serve ended: ${JSON.stringify(started.errors)}`)));
    createInterface({ input: child.stderr }).on("line", (line) => {
      const entry = JSON.parse(line);
      if (entry.level === "error") started.errors.push(entry);
      if (entry.address && entry.version) resolve(entry.address);
    });
  });
  return started;
}

/** A terminal of this client: a real process. */
class Terminal {
  constructor({ command, args = [], cwd }) {
    this.output = "";
    this.child = spawn(command, args, { cwd, stdio: ["ignore", "pipe", "pipe"] });
    for (const stream of [this.child.stdout, this.child.stderr]) stream.on("data", (data) => (this.output += data));
    this.exited = new Promise((resolve) =>
      this.child.on("close", (exitCode, signal) => resolve((this.status = { exitCode, signal }))),
    );
  }
}

/** Runs `body(agent, seen)` against a new process, which must then end by itself, silent on stderr, or against the server. */
async function withCrow(body, { clientCapabilities = {}, permission = "allow_once", sdk = acp } = {}) {
  const seen = { updates: [], asked: [], read: [], wrote: [], terminals: new Map(), released: 0, waiters: [] };
  seen.until = (wanted) =>
    new Promise((resolve) => {
      const look = () => (seen.updates.some(wanted) ? resolve() : undefined);
      seen.waiters.push(look);
      look();
    });
  seen.text = (sessionId) =>
    seen.updates
      .filter((note) => note.sessionId === sessionId && note.update.sessionUpdate === "agent_message_chunk")
      .map((note) => note.update.content.text)
      .join("");
  const connection = server ? connectToServer() : startProcess(sdk);
  const { client: methods } = sdk.methods;
  const named = (params) => seen.terminals.get(params.terminalId);
  const client = sdk
    .client({ name: "interop" })
    .onNotification(methods.session.update, ({ params }) => {
      seen.updates.push(params);
      for (const look of seen.waiters) look();
    })
    .onRequest(methods.session.requestPermission, ({ params }) => {
      seen.asked.push(params);
      const option = params.options.find((one) => one.kind === permission);
      return { outcome: option ? { outcome: "selected", optionId: option.optionId } : { outcome: "cancelled" } };
    })
    .onRequest(methods.fs.readTextFile, ({ params }) => {
      seen.read.push(params.path);
      return { content: readFileSync(params.path, "utf8").replace("Twigs", "Unsaved twigs") };
    })
    .onRequest(methods.fs.writeTextFile, ({ params }) => {
      seen.wrote.push(params.path);
      writeFileSync(params.path, params.content);
      return {};
    })
    .onRequest(methods.terminal.create, ({ params }) => {
      const terminalId = `terminal-${seen.terminals.size + 1}`;
      seen.terminals.set(terminalId, new Terminal(params));
      return { terminalId };
    })
    .onRequest(methods.terminal.output, ({ params }) => ({
      output: named(params).output,
      truncated: false,
      exitStatus: named(params).status ?? null,
    }))
    .onRequest(methods.terminal.waitForExit, ({ params }) => named(params).exited)
    .onRequest(methods.terminal.kill, ({ params }) => (named(params).child.kill(), {}))
    .onRequest(methods.terminal.release, () => ((seen.released += 1), {}));
  try {
    await client.connectWith(connection.stream, async (agent) => {
      const hello = await agent.request("initialize", {
        protocolVersion: acp.PROTOCOL_VERSION,
        clientCapabilities,
        clientInfo: { name: "interop", version: "1" },
      });
      assert.equal(hello.protocolVersion, acp.PROTOCOL_VERSION);
      await body(agent, seen, hello);
    });
  } finally {
    await connection.end();
  }
}

const connectToServer = () => ({ stream: createWebSocketStream(server.address, { WebSocket }), end: async () => {} });

/** Starts `crow acp`. */
function startProcess(sdk) {
  const argv = [...command.slice(1), "acp", ...options];
  const child = spawn(command[0], argv, { cwd, env: environment, stdio: ["pipe", "pipe", "pipe"] });
  let stderr = "";
  child.stderr.on("data", (data) => (stderr += data));
  const exit = new Promise((resolve) => child.on("close", resolve));
  const end = async () => {
    child.stdin.end();
    const late = setTimeout(() => child.kill("SIGKILL"), 60_000);
    const code = await exit;
    clearTimeout(late);
    assert.equal(stderr, "");
    assert.equal(code, 0);
  };
  return { stream: sdk.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout)), end };
}

const open = async (agent) => (await agent.request("session/new", { cwd, mcpServers: [] })).sessionId;
const text = (words) => [{ type: "text", text: words }];
const say = (agent, sessionId, words) => agent.request("session/prompt", { sessionId, prompt: text(words) });

test("initialize offers what crow serves, authenticate succeeds", limits, () =>
  withCrow(async (agent, _seen, hello) => {
    assert.equal(hello.agentCapabilities.loadSession, true);
    const offered = hello.agentCapabilities.sessionCapabilities;
    for (const name of ["list", "resume", "close", "delete"]) assert.ok(offered[name], name);
    await agent.request("authenticate", { methodId: hello.authMethods[0].id });
    await agent.request("logout", {});
    await assert.rejects(open(agent), (error) => error.code === -32000);
    await agent.request("authenticate", { methodId: hello.authMethods[0].id });
    await open(agent);
  }));

test("a prompt streams and ends; modes and options change", limits, () =>
  withCrow(async (agent, seen) => {
    const created = await agent.request("session/new", { cwd, mcpServers: [] });
    const { sessionId } = created;
    assert.equal((await say(agent, sessionId, "say hello there")).stopReason, "end_turn");
    assert.equal(seen.text(sessionId), "hello there");
    assert.ok(created.modes.availableModes.length >= 3);
    await agent.request("session/set_mode", { sessionId, modeId: "plan" });
    await seen.until((note) => note.update.sessionUpdate === "current_mode_update" && note.update.currentModeId === "plan");
    const changed = await agent.request("session/set_config_option", { sessionId, configId: "mode", value: "ask" });
    assert.equal(changed.configOptions.find((option) => option.id === "mode").currentValue, "ask");
  }));

test("a write asks first and goes through the editor; a refusal writes nothing", limits, async () => {
  const clientCapabilities = { fs: { readTextFile: true, writeTextFile: true } };
  await withCrow(
    async (agent, seen) => {
      const sessionId = await open(agent);
      await say(agent, sessionId, "read README.md then write notes.txt: Kept.");
      assert.deepEqual(seen.read.slice(0, 1), [join(cwd, "README.md")]);
      assert.deepEqual(seen.wrote, [join(cwd, "notes.txt")]);
      assert.equal(readFileSync(join(cwd, "notes.txt"), "utf8").trim(), "Kept.");
      assert.equal(seen.asked.length, 1);
      assert.equal(seen.asked[0].toolCall.content[0].type, "diff");
      const ended = seen.updates.filter((note) => note.update.status === "completed");
      assert.equal(ended.length, 2);
    },
    { clientCapabilities },
  );
  await withCrow(
    async (agent, seen) => {
      const sessionId = await open(agent);
      await say(agent, sessionId, "write other.txt: No.");
      assert.deepEqual(seen.wrote, []);
      assert.ok(seen.updates.some((note) => note.update.status === "failed"));
    },
    { clientCapabilities, permission: "reject_once" },
  );
});

test("a command runs in the client's terminal, which is released", limits, () =>
  withCrow(
    async (agent, seen) => {
      const sessionId = await open(agent);
      await say(agent, sessionId, "run echo from-a-terminal");
      assert.equal(seen.terminals.size, 1);
      assert.equal(seen.terminals.get("terminal-1").output, "from-a-terminal\n");
      assert.equal(seen.released, 1);
    },
    { clientCapabilities: { terminal: true } },
  ));

test("session/cancel and $/cancel_request end a prompt as cancelled", limits, () =>
  withCrow(async (agent, seen) => {
    const sessionId = await open(agent);
    const counting = (note) => note.update.content?.text?.includes("3");
    const first = say(agent, sessionId, "count to 1000");
    await seen.until(counting);
    await agent.notify("session/cancel", { sessionId });
    assert.equal((await first).stopReason, "cancelled");
    seen.updates.length = 0;
    const controller = new AbortController();
    const second = agent.request(
      "session/prompt",
      { sessionId, prompt: text("count to 1000") },
      { cancellationSignal: controller.signal },
    );
    await seen.until(counting);
    controller.abort();
    assert.equal((await second).stopReason, "cancelled");
    assert.equal((await say(agent, sessionId, "say still here")).stopReason, "end_turn");
  }));

test("a session is listed, loaded with its history, resumed without, closed and deleted", limits, async () => {
  let sessionId;
  await withCrow(async (agent) => {
    sessionId = await open(agent);
    await say(agent, sessionId, "say remember me");
  });
  await withCrow(async (agent, seen) => {
    const place = { sessionId, cwd, mcpServers: [] };
    const listed = (await agent.request("session/list", { cwd })).sessions;
    assert.ok(listed.some((info) => info.sessionId === sessionId && info.title === "say remember me"));
    await agent.request("session/load", place);
    assert.equal(seen.text(sessionId), "remember me");
    await agent.request("session/close", { sessionId });
    seen.updates.length = 0;
    await agent.request("session/resume", place);
    assert.equal((await say(agent, sessionId, "say again")).stopReason, "end_turn");
    assert.equal(seen.text(sessionId), "again");
    await agent.request("session/delete", { sessionId });
    assert.ok(!(await agent.request("session/list", {})).sessions.some((info) => info.sessionId === sessionId));
    await assert.rejects(agent.request("session/load", place), (error) => error.code === -32002);
  });
});

test("the unstable client archives, renames and looks up sessions, and gets plans by id", limits, () =>
  withCrow(
    async (agent, seen, hello) => {
      const offered = hello.agentCapabilities.sessionCapabilities;
      for (const name of ["archive", "status", "title"]) assert.deepEqual(offered[name], {}, name);
      const sessionId = await open(agent);
      await say(agent, sessionId, 'call update_plan {"items": [{"content": "Twigs", "status": "pending"}]}');
      const plans = seen.updates.filter((note) => note.update.sessionUpdate === "plan_update");
      assert.deepEqual(plans.map((note) => note.update.plan.entries[0].content), ["Twigs"]);
      assert.deepEqual(await agent.request("session/set_title", { sessionId, title: " A  nest " }), { title: "A nest" });
      assert.deepEqual(await agent.request("session/status", { sessionId }), { status: "open" });
      await agent.request("session/archive", { sessionId });
      assert.deepEqual(await agent.request("session/status", { sessionId }), { status: "saved" });
      const listed = async (archived) =>
        (await agent.request("session/list", { archived })).sessions.find((one) => one.sessionId === sessionId);
      assert.equal(await listed("exclude"), undefined);
      const { title, archived } = await listed("only");
      assert.deepEqual({ title, archived }, { title: "A nest", archived: true });
      await agent.request("session/unarchive", { sessionId });
      assert.equal((await listed("exclude")).archived, false);
    },
    { sdk: unstable, clientCapabilities: { plan: {} } },
  ));

test("the unstable client sets a provider, and learns how crow is authenticated", limits, () =>
  withCrow(
    async (agent) => {
      assert.equal((await agent.request("auth/status", {})).state, "not_required");
      const set = { providerId: "main", apiType: "openai", baseUrl: "http://127.0.0.1:9/v1", headers: { "X-A": "b" } };
      await agent.request("providers/set", set);
      const [main] = (await agent.request("providers/list", {})).providers;
      assert.deepEqual(main.current, { apiType: "openai", baseUrl: "http://127.0.0.1:9/v1" });
      await agent.request("providers/disable", { providerId: "unknown" });
      await assert.rejects(agent.request("providers/disable", { providerId: "main" }), (error) => error.code === -32602);
      await agent.request("logout", {});
      assert.equal((await agent.request("auth/status", {})).state, "unauthenticated");
    },
    { sdk: unstable },
  ));
