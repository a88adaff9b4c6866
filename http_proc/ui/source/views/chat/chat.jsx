import { useState } from "preact/hooks";
import { preactView } from "../preact_view.jsx";

function Chat({ page }) {
  const [question, setQuestion] = useState("");
  const [answer, setAnswer] = useState("");
  async function send(event) {
    event.preventDefault();
    setAnswer("");
    const body = { stream: true, messages: [{ role: "user", content: question }] };
    try {
      await page.server.events("v1/chat/completions", {
        body,
        onEvent({ data }) {
          if (data === "[DONE]") return;
          const piece = JSON.parse(data).choices?.[0]?.delta?.content ?? "";
          setAnswer((text) => text + piece);
        },
      });
    } catch (error) {
      setAnswer(error.message);
    }
  }
  return (
    <form onSubmit={send}>
      <textarea aria-label="Message" value={question} onInput={(event) => setQuestion(event.target.value)} />
      <button class="button primary">Send</button>
      <p>{answer}</p>
    </form>
  );
}

export const chatView = preactView({
  name: "chat",
  title: "Chat",
  icon: "M4 5h16v11H9l-5 4z",
  component: Chat,
});
