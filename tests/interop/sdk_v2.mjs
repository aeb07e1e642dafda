// The published TypeScript SDK drives a real crow with its client of the draft of version 2; node:test tells what fails.
// CROW is the command, as a JSON list. The offline model does what its prompts say, so that no endpoint is needed.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Readable, Writable } from "node:stream";
import { after, before, test } from "node:test";
import * as acp from "@agentclientprotocol/sdk/experimental/v2";

const command = JSON.parse(process.env.CROW);
const root = mkdtempSync(join(tmpdir(), "crow-interop-v2-"));
const cwd = join(root, "work");
const home = join(root, "home");
const limits = { timeout: 300_000 };
const { agent: methods, client: served } = acp.methods;

before(() => {
  mkdirSync(cwd);
  mkdirSync(home);
  writeFileSync(join(cwd, "README.md"), "# Nest\nTwigs and string.\n");
});
after(() => rmSync(root, { recursive: true, force: true }));

/** Runs `body(agent, seen, hello)` against a new process, which must then end by itself, silent on stderr. */
async function withCrow(body, { capabilities = {}, permission = "allow_once" } = {}) {
  const seen = { updates: [], asked: [], waiters: [] };
  seen.count = (wanted) =>
    new Promise((resolve) => {
      const look = () => (seen.updates.length >= wanted ? resolve() : undefined);
      seen.waiters.push(look);
      look();
    });
  const environment = { PATH: process.env.PATH, PYTHONPATH: process.env.PYTHONPATH ?? "", CROW_HOME: home, CROW_MODEL: "offline" };
  const arguments_ = [...command.slice(1), "acp", "--experimental-v2"];
  const child = spawn(command[0], arguments_, { cwd, env: environment, stdio: ["pipe", "pipe", "pipe"] });
  let stderr = "";
  child.stderr.on("data", (data) => (stderr += data));
  const exit = new Promise((resolve) => child.on("close", resolve));
  const client = acp
    .client({ name: "interop" })
    .onNotification(served.session.update, ({ params }) => {
      seen.updates.push(params);
      for (const look of seen.waiters) look();
    })
    .onRequest(served.session.requestPermission, ({ params }) => {
      seen.asked.push(params);
      const option = params.options.find((one) => one.kind === permission);
      return { outcome: option ? { outcome: "selected", optionId: option.optionId } : { outcome: "cancelled" } };
    });
  try {
    const stream = acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout));
    await client.connectWith(stream, async (agent) => {
      const info = { name: "interop", version: "1" };
      const hello = await agent.request(methods.initialize, { protocolVersion: acp.PROTOCOL_VERSION, info, capabilities });
      assert.equal(hello.protocolVersion, 2);
      await body(agent, seen, hello);
    });
  } finally {
    child.stdin.end();
    const late = setTimeout(() => child.kill("SIGKILL"), 60_000);
    const code = await exit;
    clearTimeout(late);
    assert.equal(stderr, "");
    assert.equal(code, 0);
  }
}

/** Reads a session's updates up to the first for which `wanted` is true. */
async function until(session, wanted) {
  for (;;) {
    const message = await session.nextUpdate();
    if (wanted(message.update, message)) return message;
  }
}
const stopped = (session) => until(session, (_update, message) => message.kind === "stop");

test("initialize agrees on version 2, login and logout succeed", limits, () =>
  withCrow(async (agent, _seen, hello) => {
    assert.equal(hello.info.name, "crow");
    for (const name of ["prompt", "mcp", "delete", "additionalDirectories"]) assert.ok(hello.capabilities.session[name], name);
    await agent.request(methods.auth.login, { methodId: hello.authMethods[0].methodId });
    await agent.request(methods.auth.logout, {});
    await assert.rejects(agent.buildSession(cwd).start(), (error) => error.code === -32000);
    await agent.request(methods.auth.login, { methodId: hello.authMethods[0].methodId });
    await agent.buildSession(cwd).withSession((session) => assert.ok(session.sessionId));
  }));

test("a prompt is answered with the id of its message, and its turn ends as idle", limits, () =>
  withCrow((agent) =>
    agent.buildSession(cwd).withSession(async (session) => {
      assert.ok(session.newSessionResponse.availableCommands.some((command) => command.name === "undo"));
      const { messageId } = await session.prompt("say hello there");
      assert.equal(await session.readTextUntilIdle(), "hello there");
      assert.ok(messageId);
      const options = await session.setConfigOption({ configId: "mode", type: "id", value: "plan" });
      assert.equal(options.configOptions.find((option) => option.configId === "mode").currentValue, "plan");
      assert.equal(session.configOptions.find((option) => option.configId === "mode").currentValue, "plan");
    }),
  ));

test("a write asks first, with a patch; a refusal writes nothing", limits, async () => {
  await withCrow((agent, seen) =>
    agent.buildSession(cwd).withSession(async (session) => {
      await session.prompt("write notes.txt: Kept.");
      assert.equal((await until(session, (update) => update.state === "requires_action")).update.state, "requires_action");
      assert.equal((await stopped(session)).stopReason, "end_turn");
      const { toolCall } = seen.asked[0].subject;
      assert.deepEqual(toolCall.content[0].changes, [{ operation: "add", path: join(cwd, "notes.txt"), fileType: "text" }]);
      assert.ok(toolCall.content[0].patch.text.endsWith("@@ -0,0 +1,1 @@\n+Kept.\n"));
      assert.equal(readFileSync(join(cwd, "notes.txt"), "utf8"), "Kept.\n");
    }),
  );
  await withCrow(
    (agent) =>
      agent.buildSession(cwd).withSession(async (session) => {
        await session.prompt("write other.txt: No.");
        await until(session, (update) => update.status === "failed");
        assert.equal((await stopped(session)).stopReason, "end_turn");
        assert.throws(() => readFileSync(join(cwd, "other.txt")));
      }),
    { permission: "reject_once" },
  );
});

test("a command has a terminal of the agent's, and can be cancelled while the turn goes on", limits, () =>
  withCrow((agent) =>
    agent.buildSession(cwd).withSession(async (session) => {
      await session.prompt("run echo from-a-terminal; sleep 1000");
      const { update } = await until(session, (update) => update.sessionUpdate === "terminal_output_chunk");
      assert.ok(Buffer.from(update.data, "base64").toString().startsWith("from-a-terminal"));
      const toolCallId = update.terminalId;
      assert.ok(session.canCancelToolCall(toolCallId));
      await session.cancelToolCall(toolCallId);
      await until(session, (update) => update.toolCallId === toolCallId && update.status === "cancelled");
      assert.ok(!session.canCancelToolCall(toolCallId));
      assert.equal((await stopped(session)).stopReason, "end_turn");
    }),
  ));

test("session/cancel ends the turn and takes back the prompt that waits", limits, () =>
  withCrow((agent) =>
    agent.buildSession(cwd).withSession(async (session) => {
      await session.prompt("count to 1000");
      const held = session.prompt("say never");
      await until(session, (update) => update.content?.text?.includes("3"));
      await agent.notify(methods.session.cancel, { sessionId: session.sessionId });
      await assert.rejects(held, (error) => error.code === -32800);
      assert.equal((await stopped(session)).stopReason, "cancelled");
      await session.prompt("say still here");
      assert.equal(await session.readTextUntilIdle(), "still here");
    }),
  ));

test("a prompt that waits is withdrawn by aborting it", limits, () =>
  withCrow((agent) =>
    agent.buildSession(cwd).withSession(async (session) => {
      await session.prompt("count to 3");
      const controller = new AbortController();
      const held = session.prompt("say never", { cancellationSignal: controller.signal });
      controller.abort();
      await assert.rejects(held, (error) => error.code === -32800);
      assert.equal((await stopped(session)).stopReason, "end_turn");
    }),
  ));

test("a session is listed, resumed with and without its history, closed and deleted", limits, async () => {
  let sessionId;
  await withCrow((agent) =>
    agent.buildSession(cwd).withSession(async (session) => {
      sessionId = session.sessionId;
      await session.prompt("say remember me");
      await stopped(session);
    }),
  );
  await withCrow(async (agent, seen) => {
    const place = { sessionId, cwd };
    const { sessions } = await agent.request(methods.session.list, { cwd });
    assert.ok(sessions.some((info) => info.sessionId === sessionId && info.title === "say remember me"));
    await agent.request(methods.session.resume, { ...place, replayFrom: { type: "start" } });
    await seen.count(3);
    const kinds = seen.updates.map(({ update }) => update.sessionUpdate);
    assert.deepEqual(kinds.slice(0, 3), ["user_message", "agent_message", "state_update"]);
    assert.equal(seen.updates[1].update.content[0].text, "remember me");
    assert.equal(seen.updates[2].update.state, "idle");
    await agent.request(methods.session.close, { sessionId });
    await agent.request(methods.session.close, { sessionId });
    seen.updates.length = 0;
    const resumed = await agent.request(methods.session.resume, place);
    assert.ok(resumed.availableCommands.length && resumed.configOptions.length);
    await seen.count(1);
    assert.deepEqual(seen.updates[0].update, { sessionUpdate: "state_update", state: "idle" });
    await agent.request(methods.session.delete, { sessionId });
    assert.ok(!(await agent.request(methods.session.list, {})).sessions.some((info) => info.sessionId === sessionId));
    await assert.rejects(agent.request(methods.session.resume, place), (error) => error.code === -32002);
  });
});
