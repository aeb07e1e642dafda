// A small agent on the published TypeScript SDK, for acp-check. It has no model: each prompt gets a line of text and
// a tool call that needs a permission, and "hang" waits to be cancelled.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk";

const { agent: served, client: called } = acp.methods;
const sessions = new Map();

async function work(client, sessionId, text, signal) {
  const update = (body) => client.notify(called.session.update, { sessionId, update: body });
  await update({ sessionUpdate: "agent_message_chunk", content: { type: "text", text: "On it. " }, messageId: randomUUID() });
  if (text.includes("hang")) await sleep(3_600_000, undefined, { signal, ref: false });
  if (!text.includes("tool")) return;
  const toolCallId = randomUUID();
  await update({ sessionUpdate: "tool_call", toolCallId, title: "Change a file", kind: "edit", status: "pending" });
  const options = [
    { optionId: "yes", name: "Allow", kind: "allow_once" },
    { optionId: "no", name: "Reject", kind: "reject_once" },
  ];
  let outcome;
  try {
    ({ outcome } = await client.request(called.session.requestPermission, { sessionId, toolCall: { toolCallId }, options }));
  } finally {
    const isAllowed = outcome?.outcome === "selected" && outcome.optionId === "yes";
    if (isAllowed) await update({ sessionUpdate: "tool_call_update", toolCallId, status: "in_progress" });
    await update({ sessionUpdate: "tool_call_update", toolCallId, status: isAllowed ? "completed" : "failed" });
  }
}

const app = acp
  .agent({ name: "interop" })
  .onRequest(served.initialize, () => ({
    protocolVersion: acp.PROTOCOL_VERSION,
    agentCapabilities: { loadSession: false },
    agentInfo: { name: "interop", version: "1.0.0" },
  }))
  .onRequest(served.session.new, () => {
    const sessionId = randomUUID();
    sessions.set(sessionId, null);
    return { sessionId };
  })
  .onRequest(served.session.prompt, async ({ params, client }) => {
    if (!sessions.has(params.sessionId)) throw new acp.RequestError(-32002, `No session ${params.sessionId}`);
    const controller = new AbortController();
    sessions.set(params.sessionId, controller);
    try {
      await work(client, params.sessionId, params.prompt.map((block) => block.text ?? "").join(""), controller.signal);
    } catch (error) {
      if (!controller.signal.aborted) throw error;
    }
    return { stopReason: controller.signal.aborted ? "cancelled" : "end_turn" };
  })
  .onNotification(served.session.cancel, ({ params }) => {
    sessions.get(params.sessionId)?.abort();
  });

app.connect(acp.ndJsonStream(Writable.toWeb(process.stdout), Readable.toWeb(process.stdin)));
