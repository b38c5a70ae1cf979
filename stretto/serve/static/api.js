// Calls of the server: relative addresses (a proxy may show it under a path), the API key, events of a stream.

let key = sessionStorage.getItem("stretto-key") || "";

export function setKey(value) {
  key = value;
  sessionStorage.setItem("stretto-key", value);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (options.body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError(0, "the server does not answer");
  });
  if (!answer.ok) {
    const text = await answer.text();
    let message = text || answer.statusText;
    try {
      message = JSON.parse(text).error.message;
    } catch { /* not our shape of error: its text stands */ }
    throw new ApiError(answer.status, message);
  }
  return answer;
}

// Payloads of a chat stream, until [DONE]. Throws what the server sends as an error.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError(0, "the connection was lost");
    });
    if (done) throw new ApiError(0, "the stream ended early");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const payload = JSON.parse(data);
      if (payload.error) throw new ApiError(0, payload.error.message);
      yield payload;
    }
  }
}
