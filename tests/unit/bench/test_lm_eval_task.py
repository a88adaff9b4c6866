"""The task for lm-eval."""

import json
from pathlib import Path

from bench.lm_eval_task import NAME, questions, write


def test_every_question_has_four_different_answers_of_which_one_is_right(tmp_path: Path) -> None:
    asked = questions()
    assert len(asked) == len({question.question for question in asked}) == 200
    assert all(len(set(question.choices)) == 4 for question in asked)
    places = [question.answer for question in asked]
    assert all(places.count(place) > 25 for place in range(4)), "the right one is anywhere"
    right = {question.question: question.choices[question.answer] for question in asked}
    assert right["What is the capital of Ethiopia?"] == "Addis Ababa"
    assert right["What is the opposite of brave?"] == "cowardly"
    sums = {text: answer for text, answer in right.items() if " plus " in text}
    for text, answer in sums.items():
        first, second = (int(word) for word in text.strip("?").split() if word.isdigit())
        assert first + second == int(answer)
    write(tmp_path, asked)
    task = json.loads((tmp_path / f"{NAME}.yaml").read_text())
    lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    assert [json.loads(line)["question"] for line in lines] == [
        question.question for question in asked
    ]
