"use strict";
// An ACP client for the browser. Everything from the server is shown as text, never as HTML.

const byId = (id) => document.getElementById(id);

/** Make an element with a class and a text. */
function make(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// ---------------------------------------------------------------------------------------------------------------------
// The connection: JSON-RPC over one WebSocket, which is opened again when it breaks.

class Connection {
  constructor({ onNotification, onRequest, onOpen, onState }) {
    Object.assign(this, { onNotification, onRequest, onOpen, onState });
    this.nextId = 1;
    this.waiting = new Map(); // request id -> {resolve, reject}
    this.pauseMs = 0;
    this.connect();
  }

  connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/acp`);
    this.socket = socket;
    socket.onopen = async () => {
      try {
        await this.onOpen();
        this.pauseMs = 0;
        this.onState("connected");
      } catch (error) {
        if (this.socket === socket) socket.close();
      }
    };
    socket.onmessage = (event) => this.receive(JSON.parse(event.data));
    socket.onclose = () => this.lost(socket);
  }

  lost(socket) {
    if (this.socket !== socket) return;
    this.socket = null;
    for (const { reject } of this.waiting.values()) reject(new Broken());
    this.waiting.clear();
    this.onState("broken");
    this.pauseMs = Math.min(8000, Math.max(250, this.pauseMs * 2));
    setTimeout(() => this.reconnect(), this.pauseMs);
  }

  async reconnect() {
    // A WebSocket does not say why it was refused, so ask whether this browser may still connect.
    const answer = await fetch("paired", { cache: "no-store" }).catch(() => null);
    if (answer && answer.status === 401) return showPairing();
    this.connect();
  }

  get isOpen() {
    return this.socket !== null && this.socket.readyState === WebSocket.OPEN;
  }

  send(message) {
    if (!this.isOpen) throw new Broken();
    this.socket.send(JSON.stringify({ jsonrpc: "2.0", ...message }));
  }

  request(method, params) {
    const id = this.nextId++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      try {
        this.send({ id, method, params });
      } catch (error) {
        this.waiting.delete(id);
        reject(error);
      }
    });
  }

  receive(message) {
    if (message.method !== undefined && message.id !== undefined) return this.onRequest(message);
    if (message.method !== undefined) return this.onNotification(message);
    const waiting = this.waiting.get(message.id);
    if (!waiting) return;
    this.waiting.delete(message.id);
    if (message.error) waiting.reject(new Refused(message.error));
    else waiting.resolve(message.result ?? {});
  }
}

/** The connection broke before the answer came. */
class Broken extends Error {}

/** The server answered with an error. */
class Refused extends Error {
  constructor(error) {
    super(error.message);
    this.reason = error.data && error.data.reason;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What is shown of one session.

class Session {
  constructor({ sessionId, cwd, title }) {
    Object.assign(this, { id: sessionId, cwd, title: title || sessionId });
    this.log = make("div");
    this.cursor = null; // the place up to which this session is shown, or null if it is not open
    this.messages = new Map(); // message id -> element
    this.calls = new Map(); // tool call id -> {call, element}
    this.plan = null;
    this.mode = "";
    this.modes = [];
    this.usage = "";
    this.isRunning = false;
    this.unanswered = new Map(); // prompt id -> text: prompts without an answer
    this.opening = null;
  }

  /** Show one update of the protocol. */
  apply(update, meta) {
    if (meta && meta["acp/cursor"]) this.cursor = meta["acp/cursor"];
    switch (update.sessionUpdate) {
      case "user_message_chunk": return this.addText("user", update);
      case "agent_message_chunk": return this.addText("agent", update);
      case "agent_thought_chunk": return this.addText("thought", update);
      case "tool_call":
      case "tool_call_update": return this.showCall(update);
      case "plan": return this.showPlan(update.entries || []);
      case "current_mode_update": this.mode = update.currentModeId; return;
      case "usage_update":
        this.usage = update.size ? `context ${Math.round((100 * update.used) / update.size)} %` : "";
        return;
      case "session_info_update":
        if (typeof update.title === "string") this.title = update.title;
        if (update._meta && update._meta["acp/turnState"]) this.isRunning = update._meta["acp/turnState"].state === "running";
    }
  }

  addText(kind, { content, messageId }) {
    const text = content.type === "text" ? content.text : `[${content.type}]`;
    const key = `${kind} ${messageId}`;
    let element = messageId && this.messages.get(key);
    if (!element) {
      element = make("p", `text ${kind}`);
      const mine = kind === "user" && this.log.querySelector(".pending");
      if (mine && mine.textContent === text) mine.remove();
      this.log.append(element);
      if (messageId) this.messages.set(key, element);
    }
    element.append(text);
  }

  showCall(update) {
    const known = this.calls.get(update.toolCallId);
    const call = { ...(known ? known.call : {}), ...update };
    // Each update has only the new part of a command's output.
    call.output = (known ? known.call.output : "") + (update._meta?.terminal_output?.data ?? "");
    const element = known ? known.element : make("details");
    if (!known) this.log.append(element);
    this.calls.set(update.toolCallId, { call, element });
    element.className = call.status === "failed" ? "failed" : "";
    const mark = { pending: "○", in_progress: "◌", completed: "✓", failed: "✗" }[call.status] || "○";
    const summary = make("summary", "", `${mark} ${call.title || call.toolCallId}`);
    summary.setAttribute("aria-label", `${call.title || call.toolCallId}: ${String(call.status).replace("_", " ")}`);
    element.replaceChildren(summary, ...contentOf(call));
  }

  showPlan(entries) {
    if (!this.plan) {
      this.plan = make("ul", "plan");
      this.log.append(this.plan);
    }
    const marks = { pending: "○", in_progress: "◌", completed: "✓" };
    this.plan.replaceChildren(...entries.map((entry) => make("li", "", `${marks[entry.status] || "○"} ${entry.content}`)));
  }

  addRemark(words) {
    this.log.append(make("p", "text remark", words));
  }

  clear() {
    this.log.replaceChildren();
    this.messages.clear();
    this.calls.clear();
    this.plan = null;
    this.cursor = null;
  }
}

/** Return elements for the content of a tool call: texts, diffs and the output of commands. */
function contentOf(call) {
  const made = [];
  for (const part of call.content || []) {
    if (part.type === "diff") made.push(diffOf(part));
    else if (part.type === "content" && part.content.type === "text") made.push(make("pre", "", part.content.text));
    else if (part.type === "content") made.push(make("p", "", `[${part.content.type}]`));
  }
  if (call.output) made.push(make("pre", "", call.output));
  return made;
}

/** Return a diff. Of the lines that both texts begin or end with, it shows only the three nearest to the change. */
function diffOf({ path, oldText, newText }) {
  const before = oldText === null || oldText === undefined ? [] : oldText.split("\n");
  const after = newText.split("\n");
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start++;
  let end = 0;
  const shorter = Math.min(before.length, after.length) - start;
  while (end < shorter && before[before.length - 1 - end] === after[after.length - 1 - end]) end++;
  const pre = make("pre");
  pre.append(make("span", "when", `${path}\n`));
  const from = Math.max(0, start - 3);
  for (const line of before.slice(from, start)) pre.append(`  ${line}\n`);
  for (const line of before.slice(start, before.length - end)) pre.append(make("span", "removed", `- ${line}\n`));
  for (const line of after.slice(start, after.length - end)) pre.append(make("span", "added", `+ ${line}\n`));
  for (const line of after.slice(after.length - end, after.length - end + 3)) pre.append(`  ${line}\n`);
  return pre;
}

// ---------------------------------------------------------------------------------------------------------------------
// Questions. An answer that was given while the connection broke is given again if the same question comes back on the
// next connection. A call may ask further questions, and each of them is shown.

const questions = new Map(); // "session call" -> {request, element}
const given = new Map(); // "session call" -> {result, asked, socket}: the last answer and its question, as text

function ask(request) {
  const { sessionId, toolCall, options } = request.params;
  const key = `${sessionId} ${toolCall.toolCallId}`;
  const asked = JSON.stringify(request.params);
  const answer = given.get(key);
  if (answer && answer.asked === asked && answer.socket !== connection.socket) {
    answer.socket = connection.socket;
    return respond(request.id, answer.result);
  }
  forget(key);
  const element = make("form", "question");
  const session = sessions.get(sessionId);
  element.append(make("h2", "", toolCall.title || "Allow this?"));
  element.append(make("p", "when", session ? session.title : sessionId), ...contentOf(toolCall));
  const answers = make("div", "answers");
  for (const option of options) {
    const button = make("button", "", option.name);
    button.type = "button";
    button.onclick = () => {
      const result = { outcome: { outcome: "selected", optionId: option.optionId } };
      given.set(key, { result, asked, socket: connection.socket });
      forget(key);
      respond(request.id, result);
    };
    answers.append(button);
  }
  element.append(answers);
  questions.set(key, { request, element });
  byId("questions").append(element);
  if (document.hidden && "Notification" in window && Notification.permission === "granted") {
    new Notification("Crow asks", { body: toolCall.title || "" });
  }
  showCounts();
}

function respond(id, result) {
  try {
    connection.send({ id, result });
  } catch (error) {
    // The question is asked again after the connection is back.
  }
}

function forget(key) {
  const question = questions.get(key);
  if (!question) return;
  questions.delete(key);
  question.element.remove();
  showCounts();
}

function forgetRequest(id) {
  for (const [key, { request }] of questions) if (request.id === id) forget(key);
}

// ---------------------------------------------------------------------------------------------------------------------
// The page.

const sessions = new Map(); // session id -> Session
let current = null;
let connection = null;
let nextPage = null;

function showPairing(words = "") {
  byId("app").hidden = true;
  byId("pairing").hidden = false;
  byId("connection").textContent = "";
  if (words) byId("pairing-words").textContent = words;
}

function showCounts() {
  document.title = questions.size ? `(${questions.size}) Crow` : "Crow";
}

function showSessions() {
  byId("sessions").replaceChildren(
    ...[...sessions.values()].map((session) => {
      const item = make("li");
      const button = make("button", "", session.title);
      button.type = "button";
      button.append(make("br"), make("span", "when", `${session.isRunning ? "running · " : ""}${session.cwd}`));
      button.setAttribute("aria-current", String(session === current));
      button.onclick = () => show(session);
      item.append(button);
      return item;
    }),
  );
  byId("more").hidden = nextPage === null;
}

function showCurrent() {
  if (!current) return;
  byId("title").textContent = current.title;
  byId("usage").textContent = current.usage;
  byId("cancel").hidden = !current.isRunning && current.unanswered.size === 0;
  const mode = byId("mode");
  if (mode.dataset.shown !== JSON.stringify(current.modes)) {
    mode.dataset.shown = JSON.stringify(current.modes);
    mode.replaceChildren(...current.modes.map(({ id, name }) => Object.assign(make("option", "", name), { value: id })));
  }
  mode.value = current.mode;
}

async function show(session) {
  document.body.classList.remove("listing");
  byId("back").setAttribute("aria-expanded", "false");
  current = session;
  location.hash = session.id;
  const log = byId("log");
  log.replaceChildren(session.log);
  byId("compose").hidden = false;
  showSessions();
  try {
    await open(session);
  } catch (error) {
    if (!(error instanceof Broken)) session.addRemark(error.message);
  }
  showCurrent();
  log.scrollTop = log.scrollHeight;
}

/** Open the session. Get only the updates after the cursor if there is one, otherwise the whole history. */
function open(session) {
  session.opening ??= openNow(session).finally(() => { session.opening = null; });
  return session.opening;
}

async function openNow(session) {
  if (session.isOpen) return;
  const params = { sessionId: session.id, cwd: session.cwd, mcpServers: [] };
  let result;
  if (session.cursor !== null) {
    const sent = { crow: { promptIds: [...session.unanswered.keys()] }, "acp/cursor": session.cursor };
    try {
      result = await connection.request("session/resume", { ...params, _meta: sent });
    } catch (error) {
      if (error.reason !== "cursor_gap") throw error;
      session.clear();
    }
  }
  result ??= await connection.request("session/load", params);
  session.isOpen = true;
  const { modes, _meta } = result;
  if (modes) Object.assign(session, { mode: modes.currentModeId, modes: modes.availableModes });
  if (_meta && _meta["acp/cursor"]) session.cursor = _meta["acp/cursor"];
  if (_meta && _meta["acp/turnState"]) session.isRunning = _meta["acp/turnState"].state === "running";
  for (const [id, text] of session.unanswered) sendPrompt(session, id, text);
}

async function prompt(session, text) {
  const id = newId();
  session.unanswered.set(id, text);
  session.log.append(make("p", "text user pending", text));
  byId("log").scrollTop = byId("log").scrollHeight;
  showCurrent();
  await open(session).catch(() => {});
  if (session.isOpen) sendPrompt(session, id, text);
}

/** Send a prompt, or send it again: crow runs it once, because it has an id. */
async function sendPrompt(session, id, text) {
  if (session.sending?.has(id)) return;
  (session.sending ??= new Set()).add(id);
  try {
    const result = await connection.request("session/prompt", {
      sessionId: session.id,
      prompt: [{ type: "text", text }],
      _meta: { crow: { promptId: id } },
    });
    if (result.stopReason !== "end_turn") session.addRemark(`The turn ended: ${result.stopReason.replaceAll("_", " ")}.`);
  } catch (error) {
    if (error instanceof Broken || error.reason === "draining") return; // it is sent again on the next connection
    session.addRemark(error.message);
  } finally {
    session.sending.delete(id);
  }
  session.unanswered.delete(id);
  session.isRunning = session.unanswered.size > 0;
  showCurrent();
}

/** Return 128 random bits as text. `crypto.randomUUID` exists only on pages with HTTPS. */
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function listSessions(cursor = null) {
  const found = await connection.request("session/list", cursor ? { cursor } : {});
  for (const info of found.sessions) {
    const known = sessions.get(info.sessionId);
    if (known) Object.assign(known, { cwd: info.cwd, title: info.title || known.title });
    else sessions.set(info.sessionId, new Session(info));
  }
  nextPage = found.nextCursor || null;
  if (!byId("directory").value && found.sessions[0]) byId("directory").value = found.sessions[0].cwd;
  showSessions();
  return found.sessions.map(({ sessionId }) => sessions.get(sessionId));
}

/** Open the sessions that were open before, and those that are open on the server, which may ask questions. */
async function onOpen() {
  for (const session of sessions.values()) session.isOpen = false;
  for (const key of [...questions.keys()]) forget(key);
  await connection.request("initialize", {
    protocolVersion: 1,
    clientInfo: { name: "crow-page", title: "Crow in a browser", version: "1" },
    clientCapabilities: { _meta: { "acp/cursor": true, terminal_output: true } },
  });
  const before = [...sessions.values()].filter((session) => session.cursor !== null || session.unanswered.size);
  const listed = await listSessions();
  for (const session of before) await open(session);
  const wanted = sessions.get(location.hash.slice(1));
  if (wanted && current === null) await show(wanted);
  watchOthers(listed.slice(0, 20));
}

async function watchOthers(listed) {
  for (const session of listed) {
    try {
      if (session.isOpen) continue;
      const { status } = await connection.request("session/status", { sessionId: session.id });
      if (status === "open") await open(session);
    } catch (error) {
      if (error instanceof Broken) return;
    }
  }
}

function onNotification({ method, params }) {
  if (method === "$/cancel_request") return forgetRequest(params.requestId);
  if (method !== "session/update") return;
  const session = sessions.get(params.sessionId);
  if (!session) return;
  const log = byId("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const { update } = params;
  session.apply(update, params._meta);
  if (update.toolCallId && update.status && update.status !== "pending") {
    const key = `${session.id} ${update.toolCallId}`;
    given.delete(key);
    if (update.status === "completed" || update.status === "failed") forget(key); // a running call may be asked about, too
  }
  if (update.sessionUpdate === "session_info_update") showSessions();
  if (session !== current) return;
  showCurrent();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function onRequest(request) {
  if (request.method === "session/request_permission") return ask(request);
  connection.send({ id: request.id, error: { code: -32601, message: `This page has no ${request.method}.` } });
}

function onState(state) {
  byId("connection").textContent = state === "connected" ? "Connected" : "Connection lost; trying again …";
}

function listen() {
  byId("back").onclick = () => {
    const isListing = document.body.classList.toggle("listing");
    byId("back").setAttribute("aria-expanded", String(isListing));
  };
  byId("more").onclick = () => listSessions(nextPage);
  byId("compose").onsubmit = (event) => {
    event.preventDefault();
    const field = byId("prompt");
    const text = field.value.trim();
    if (!text || !current) return;
    field.value = "";
    prompt(current, text);
    if ("Notification" in window && Notification.permission === "default") Notification.requestPermission();
  };
  byId("prompt").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("compose").requestSubmit();
  };
  byId("cancel").onclick = () => {
    if (connection.isOpen) connection.send({ method: "session/cancel", params: { sessionId: current.id } });
  };
  byId("mode").onchange = async (event) => {
    const session = current;
    try {
      await connection.request("session/set_mode", { sessionId: session.id, modeId: event.target.value });
      session.mode = event.target.value;
    } catch (error) {
      session.addRemark(error.message || "The mode was not changed, because the connection broke.");
    }
    showCurrent();
  };
  byId("start").onsubmit = async (event) => {
    event.preventDefault();
    const cwd = byId("directory").value.trim();
    try {
      const made = await connection.request("session/new", { cwd, mcpServers: [] });
      const session = new Session({ sessionId: made.sessionId, cwd, title: "New session" });
      Object.assign(session, { isOpen: true, mode: made.modes.currentModeId, modes: made.modes.availableModes });
      session.cursor = (made._meta && made._meta["acp/cursor"]) || null;
      sessions.set(session.id, session);
      await show(session);
      byId("prompt").focus();
    } catch (error) {
      byId("connection").textContent = error.message || "Connection lost";
    }
  };
  byId("unpair").onclick = async () => {
    await fetch("unpair", { method: "POST" });
    location.reload();
  };
}

async function begin() {
  listen();
  const token = new URLSearchParams(location.hash.slice(1)).get("pair");
  if (token) {
    history.replaceState(null, "", location.pathname);
    const answer = await fetch("pair", { method: "POST", body: JSON.stringify({ token }) });
    if (!answer.ok) return showPairing((await answer.json()).message);
    localStorage.setItem("paired", "yes");
  }
  const paired = await fetch("paired", { cache: "no-store" });
  if (paired.status === 401) return showPairing();
  byId("app").hidden = false;
  byId("unpair").hidden = localStorage.getItem("paired") !== "yes";
  if (!location.hash) document.body.classList.add("listing");
  connection = new Connection({ onNotification, onRequest, onOpen, onState });
}

begin();
