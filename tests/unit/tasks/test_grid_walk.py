import string

import networkx
import pytest

from megatron_bapo.data.reasoning_gym_tasks import generate_entries
from megatron_bapo.errors import UserError
from megatron_bapo.rewards.reasoning_gym_answer import compute_score

NAMES = string.ascii_letters + string.digits + "+-"


def grid(width: int, height: int) -> networkx.Graph:
    graph = networkx.grid_2d_graph(height, width)
    return networkx.relabel_nodes(graph, {(y, x): NAMES[y * width + x] for y, x in graph})


def score(answer: str, entry: dict) -> float:
    return compute_score("reasoning_gym/grid_walk", answer, entry["answer"], entry)["score"]


@pytest.mark.parametrize("params", [{}, {"width": 5, "height": 3, "max_distance": 6}, {"detours": 0.0}])
def test_questions_and_examples_follow_the_parameters(params: dict):
    width, height = params.get("width", 8), params.get("height", 8)
    graph = grid(width, height)
    for _, entry in generate_entries({"grid_walk": params}, size=100, seed=3):
        start, target = entry["question"].removesuffix(":").split(">")
        walk = [start, *entry["answer"]]
        distance = networkx.shortest_path_length(graph, start, target)
        assert networkx.is_path(graph, walk)
        assert walk[-1] == target
        assert 2 <= distance <= params.get("max_distance", 7)
        assert len(entry["answer"]) <= 30
        assert params.get("detours") != 0.0 or len(entry["answer"]) == distance


def test_any_walk_to_the_target_is_right_and_no_other_response():
    entry = {"question": "a>k:", "answer": "bcdlk", "metadata": {"width": 8, "height": 8}}
    graph = grid(8, 8)
    walks = {"".join(path[1:]) for path in networkx.all_simple_paths(graph, "a", "k", cutoff=7)}
    assert {"bck", "bjk", "ijk", "iqrsk"} < walks
    assert {score(walk, entry) for walk in walks} == {1.0}
    assert score("bcdlklk", entry) == 1.0
    wrong = ["", "k", "abck", "bc", "bck ", "bckj", "Bck", "bcdk", "ik", "bcsk", "bc\nk", "hgfedck", "bck:", "é"]
    assert {walk: score(walk, entry) for walk in wrong if score(walk, entry)} == {"bck ": 1.0}


def test_a_restated_target_is_named_after_each_cell():
    params = {"restate_target": True, "max_steps": 12}
    for (_, entry), (_, plain) in zip(
        generate_entries({"grid_walk": params}, size=50, seed=3),
        generate_entries({"grid_walk": {"max_steps": 12}}, size=50, seed=3),
        strict=True,
    ):
        answer, target = entry["answer"], entry["question"][2]
        assert entry["question"] == plain["question"]
        assert answer == "".join(cell + target for cell in plain["answer"])
        assert score(answer, entry) == 1.0
        wrong = [plain["answer"], answer[:-1], answer[:-2], answer + target, answer[1:], answer[0] + "é" + answer[2:]]
        assert [score(each, entry) for each in wrong] == [0.0] * 6


def test_a_row_does_not_continue_in_the_next_one():
    entry = {"question": "h>q:", "answer": "pq", "metadata": {"width": 8, "height": 8}}
    assert score("ij" + "rq", entry) == 0.0
    assert score("ponmlkjiq", entry) == 1.0
    narrow = {"question": "a>f:", "answer": "bef", "metadata": {"width": 3, "height": 2}}
    assert score("def", narrow) == 1.0
    assert score("ghef", narrow) == 0.0


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"width": 9}, "width x height must be at most 64"),
        ({"height": 1}, "width and height must be at least 2"),
        ({"max_distance": 15}, "max_distance <= 14"),
        ({"max_steps": 6}, "max_steps must be at least max_distance"),
        ({"detours": 1.0}, "detours must be at least 0 and less than 1"),
    ],
)
def test_parameters_without_a_walk_are_refused(params: dict, problem: str):
    with pytest.raises(UserError, match="grid_walk rejects the parameters") as refused:
        generate_entries({"grid_walk": params}, size=10, seed=1)
    assert problem in str(refused.value)
