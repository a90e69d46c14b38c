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

/** Yield the events of a streamed completion as parsed JSON. */
export async function* completion(body, signal) {
  const response = await checked(await fetch("v1/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
