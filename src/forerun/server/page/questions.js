// The questions of the Diagnosis tab: one screen at a time, answered with buttons or a number.

import { post } from "./api.js";
import { byId, element } from "./format.js";

const answers = {};

export function prepareQuestions() {
  const form = byId("questions");
  form.append(sendButton("Begin"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    for (const [fact, value] of new FormData(form)) answers[fact] = value || "unknown";
    try {
      show(await (await post("live/answers", { answers })).json());
    } catch (error) {
      byId("asked").replaceChildren(element("p", "note", error.message));
    }
  });
}

function sendButton(text) {
  const button = element("button", "", text);
  button.type = "submit";
  return button;
}

function show({ question, num_asked: number, diagnosis }) {
  const form = byId("questions");
  const screen = question.map(fieldOf);
  if (question.length) screen.unshift(element("p", "note", `Question ${number + 1}`));
  else screen.push(element("p", "note", "No more questions."));
  form.replaceChildren(...screen, ...(question.length ? [sendButton("Next")] : []));
  const causes = diagnosis.causes.map((cause) => element("li", "", `${cause.label.replaceAll("_", " ")}: ${cause.what}`));
  const changes = diagnosis.changes.map((change) => element("li", "", change));
  const lists = [causes, changes].filter((items) => items.length).map((items) => {
    const list = element("ul", "plain-list");
    list.append(...items);
    return list;
  });
  byId("asked").replaceChildren(element("p", "verdict", number ? `With your answers: ${diagnosis.headline}` : ""), ...lists);
}

function fieldOf({ fact, text, how, minutes, answers: choices }) {
  const field = element("fieldset", "question");
  field.append(element("legend", "", text));
  if (how) field.append(element("p", "note", `To find out (${minutes} min): ${how}.`));
  const known = choices.filter((choice) => choice !== "unknown");
  if (!known.length) {
    const input = element("input");
    Object.assign(input, { type: "number", step: "any", min: "0", name: fact, placeholder: "don't know" });
    input.setAttribute("aria-label", text);
    field.append(input);
    return field;
  }
  for (const choice of [...known, "unknown"]) {
    const label = element("label", "check");
    const input = element("input");
    Object.assign(input, { type: "radio", name: fact, value: choice, checked: choice === "unknown" });
    label.append(input, ` ${choice === "unknown" ? "don't know" : choice}`);
    field.append(label);
  }
  return field;
}
