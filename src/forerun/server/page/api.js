// Requests to this server alone. A key is kept in the session storage of this tab.

const KEY = "forerun-key";

export const saveKey = (key) => sessionStorage.setItem(KEY, key);

function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answers ${response.status}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
  } catch {
    // A proxy may answer with a page of its own; the status is all there is to say.
  }
  throw new Refused(response.status, message);
}

export async function getJson(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

export async function post(path, body, signal) {
  return checked(await fetch(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  }));
}

/** Yield the events of a streamed answer as parsed JSON; an event with an error is thrown. */
export async function* stream(path, body, signal) {
  const response = await post(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended within the answer");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
