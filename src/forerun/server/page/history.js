// Conversations of the chat, kept in the storage of this browser; the oldest are dropped at the bounds.

const KEY = "forerun-chats";
const MAX_CHATS = 30;
const MAX_CHARACTERS = 1_000_000;

/** Return the conversations, the latest first; nothing where the browser keeps none. */
export function readChats() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => Array.isArray(chat?.turns) && chat.turns.length) : [];
  } catch {
    return [];
  }
}

/** Keep a conversation as the latest one, in place of what was kept of it; one without turns is dropped. */
export function saveChat(chat) {
  const chats = [chat, ...readChats().filter((each) => each.id !== chat.id)].filter((each) => each.turns.length).slice(0, MAX_CHATS);
  if (!chats.length) clearChats();
  for (; chats.length; chats.pop()) {
    const text = JSON.stringify(chats);
    if (text.length > MAX_CHARACTERS) continue;
    try {
      localStorage.setItem(KEY, text);
      return;
    } catch {
      // The browser's own bound is lower: try again without the oldest.
    }
  }
}

export function clearChats() {
  try {
    localStorage.removeItem(KEY);
  } catch {
    // A browser that keeps nothing has nothing to remove.
  }
}
