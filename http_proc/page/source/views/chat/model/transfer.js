/** Conversations as files: all that the browser keeps, or lists of messages as the API has them. */

import { Conversation, newId } from "./conversation.js";

const FORMAT = "quadriga-conversations";
const ROLES = ["system", "user", "assistant", "tool"];

export function exportText(records) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations: records }, null, 1);
}

/**
 * Return the conversations of a file, with new ids.
 *
 * It has what `exportText` wrote, or { messages: [{ role, content }] }, or a list of these.
 * Throws an Error that says what is wrong.
 */
export function importText(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (content?.format === FORMAT) return content.conversations.map(fromRecord);
  const lists = Array.isArray(content) ? content : [content];
  return lists.map(fromMessages);
}

function fromRecord(record) {
  if (!Array.isArray(record?.messages) || !record.messages.every(isMessage)) {
    throw new Error("The file has a conversation without messages.");
  }
  return new Conversation({ ...record, id: newId() });
}

function isMessage(one) {
  return typeof one?.id === "string" && typeof one.content === "string" && ROLES.includes(one.role);
}

function fromMessages(one) {
  const messages = one?.messages ?? one?.body?.messages;
  if (!Array.isArray(messages)) {
    throw new Error("The file has neither conversations of this page nor a list of messages.");
  }
  const conversation = new Conversation({});
  let parent = "";
  for (const { role, content, reasoning_content: reasoning, tool_calls: calls, tool_call_id: toolCallId } of messages) {
    const text = typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");
    if (!ROLES.includes(role)) throw new Error(`The file has a message of the role ${role}.`);
    if (role === "system") {
      conversation.settings.value = { ...conversation.settings.value, system: text };
      continue;
    }
    const toolCalls = calls?.map(({ id, function: { name, arguments: input } }) => ({ id, name, arguments: input }));
    parent = conversation.add({ parent, role, content: text, reasoning, toolCalls, toolCallId }).id;
  }
  return conversation;
}
