/** What a user does in a conversation. */

import { generate, newBatch, stopAll } from "./generation.js";
import { completionBody, requestBody } from "./settings.js";
import { nameOfDefault } from "../../../api/models.js";
import { save } from "./store.js";

/** Actions on a conversation. `server`: calls of the API. `modelOf(settings)`: what answers. */
export class Actions {
  constructor(conversation, server, modelOf) {
    this.conversation = conversation;
    this.server = server;
    this.modelOf = modelOf;
  }

  /** Whether the model answers chats; a model without a chat template continues texts. */
  hasChat() {
    return this.modelOf(this.conversation.settings.value)?.capabilities?.chat ?? true;
  }

  /** Send a message after the last one that is shown, or after `parent`. Throws InvalidValue. */
  send(text, parent = this.conversation.shownPath().at(-1) ?? "") {
    this.request([{ role: "user", content: text }]); // before anything changes: it may be invalid
    const message = this.conversation.add({ parent, role: "user", content: text });
    this.answer(message.id);
  }

  /** Send another text in the place of a message, as a new version. */
  edit(message, text) {
    this.send(text, message.parent);
  }

  /** Generate the answer again, as a new version. */
  regenerate(message) {
    this.answer(message.parent);
  }

  /** Send the results of the calls of an answer, in their order. */
  sendResults(message, results) {
    let parent = message.id;
    message.toolCalls.forEach((call, index) => {
      const made = { parent, role: "tool", content: results[index], toolCallId: call.id };
      parent = this.conversation.add(made).id;
    });
    this.answer(parent);
  }

  /** Ask for answers to a message. */
  answer(parent) {
    const { conversation } = this;
    const num = conversation.settings.value.numAnswers;
    const request = this.request(conversation.messagesUpTo(parent), num);
    const made = Array.from({ length: num }, () =>
      conversation.add({ parent, role: "assistant", status: "waiting" }),
    );
    conversation.select(made[0]);
    const batch = newBatch(conversation, made.map((one) => one.id));
    for (const one of made) conversation.update(one.id, { batch: batch.id });
    this.run(batch, request);
  }

  /** Go on with an answer that was stopped or broke off. */
  goOn(message) {
    const { conversation } = this;
    const { path, body } = this.request(conversation.messagesUpTo(message.id), 1);
    const batch = newBatch(conversation, [message.id]);
    this.run(batch, { path, body: this.hasChat() ? { ...body, continue_final_message: true } : body });
  }

  /** Answer again with another token in the place of one, as a new version. */
  branch(message, index, other) {
    const { conversation } = this;
    const tokens = [...message.tokens.slice(0, index), { ...message.tokens[index], ...other }];
    const made = { parent: message.parent, role: "assistant", tokens, status: "stopped" };
    if (tokens.some((one) => one.id === undefined)) {
      this.goOn(conversation.add({ ...made, content: tokens.map((one) => one.text).join("") }));
      return;
    }
    // The answer has the text of these tokens once more: the server keeps them as they are.
    const { id } = conversation.add(made);
    const { path, body } = this.request(conversation.messagesUpTo(message.parent), 1);
    const ids = tokens.map((one) => one.id);
    this.run(newBatch(conversation, [id]), { path, body: { ...body, first_token_ids: ids } });
  }

  run(batch, request) {
    const { conversation, server } = this;
    save(conversation);
    generate(conversation, batch, { ...request, server, save: () => save(conversation) });
  }

  stop() {
    stopAll(this.conversation);
  }

  /** Return path and body of a request. */
  request(messages, numAnswers = 1) {
    const chosen = this.conversation.settings.value;
    const settings = { ...chosen, model: chosen.model || nameOfDefault() };
    return this.hasChat()
      ? { path: "v1/chat/completions", body: requestBody(settings, messages, numAnswers) }
      : { path: "v1/completions", body: completionBody(settings, messages, numAnswers) };
  }
}
