from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.data.rollout_samples import TOKENIZER_FILE
from megatron_bapo.errors import UserError
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.viewer.answers import MAX_BYTES
from megatron_bapo.viewer.export import _MODULES, export
from megatron_bapo.viewer.samples import MAX_TOKENS, RowGroups, Samples
from megatron_bapo.viewer.server import listen, opened
from tests.unit.viewer.clients import SECRET, client_of
from tests.unit.viewer.made_runs import HOSTILE, damage, group, prompt, sampled, small_run, write_step


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("small") / "run")


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[TestClient]:
    with client_of(run) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/wrong/api/runs/0", f"/{SECRET}", f"/{SECRET}x/", "/api/runs/0", "//", "/é/"]
)
def test_a_url_without_the_token_is_forbidden(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 403
    assert "steps" not in answer.text


@pytest.mark.parametrize(
    "name",
    ["../server.py", "..%2fserver.py", "%2e%2e/%2e%2e/server.py", "..%5cserver.py", "/etc/passwd", "%2fetc%2fpasswd"],
)
def test_no_path_leads_out_of_the_assets(client: TestClient, name: str) -> None:
    answer = client.get(f"/{SECRET}/{name}")
    assert answer.status_code in (403, 404)
    assert "import" not in answer.text


def test_another_host_name_is_refused(client: TestClient) -> None:
    """A page of another site whose name was pointed at this machine must not read the answers."""
    assert client.get(f"/{SECRET}/api/runs/0", headers={"host": "evil.example"}).status_code == 400


def test_only_reading_is_possible(client: TestClient) -> None:
    assert client.post(f"/{SECRET}/api/runs/0").status_code == 405


@pytest.mark.parametrize(
    "path", ["/", f"/{SECRET}/", f"/{SECRET}/main.js", f"/{SECRET}/api/runs/0", f"/{SECRET}/nothing"]
)
def test_every_answer_has_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")


@pytest.mark.parametrize("page", ["", "run.html"])
def test_browsers_need_not_ask_for_an_icon(client: TestClient, page: str) -> None:
    """Firefox asks for /favicon.ico of a page without an icon, and says that the policy forbids it."""
    answer = client.get(f"/{SECRET}/{page}")
    assert '<link rel="icon" href="data:,">' in answer.text
    assert "img-src data:;" in answer.headers["content-security-policy"]


def test_the_policy_of_an_exported_page_allows_its_icon(run: Path, tmp_path: Path) -> None:
    export(Samples(RunDirectory(run)), tmp_path / "page.html", None)
    head = (tmp_path / "page.html").read_text().partition("<style>")[0]
    assert '<link rel="icon" href="data:,">' in head
    assert "img-src data:;" in head


@pytest.mark.parametrize("sheet", ["view.css", "run.css"])
def test_styles_are_written_as_safari_reads_them(client: TestClient, sheet: str) -> None:
    """It ignores a text-decoration with more than lines, and user-select without its prefix."""
    style = client.get(f"/{SECRET}/{sheet}").text
    assert set(re.findall(r"text-decoration: ([^;]*);", style)) <= {"none", "underline", "line-through"}
    assert style.count("-webkit-user-select: none; user-select: none;") == style.count(" user-select: none;") > 0


@pytest.mark.parametrize("path", ["", "/steps/1", "/figures", "/timeline"])
def test_a_run_that_was_deleted_is_named(tmp_path: Path, path: str) -> None:
    root = small_run(tmp_path / "run")
    with client_of(root) as client:
        assert client.get(f"/{SECRET}/api/runs/0{path}").status_code == 200
        shutil.rmtree(root)
        answer = client.get(f"/{SECRET}/api/runs/0{path}")
        assert (answer.status_code, answer.text) == (404, f"{root} does not exist any more: it was deleted or moved\n")


def test_the_server_listens_on_the_loopback_interface_only() -> None:
    with listen(0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(UserError, match=f"port {port} cannot be used: .*; give another --port"):
            listen(port)


def test_a_step_is_listed_in_pages(client: TestClient) -> None:
    pages = [
        client.get(f"/{SECRET}/api/runs/0/steps/1", params={"start": s, "count": 5}).json() for s in (0, 5, 10, 15)
    ]
    assert [(page["start"], page["end"], page["total"]) for page in pages] == [
        (0, 5, 12),
        (5, 10, 12),
        (10, 12, 12),
        (12, 12, 12),
    ]
    assert pages[0]["columns"]["group"] == [2, 2, 2, 2, 4]
    assert pages[1]["columns"]["finish_reason"] == ["length", "stop", "length", "stop", "stop"]
    assert pages[0]["columns"]["excerpt"] == ["What is 17 + 25?", "", "", "", "What is 3 * 7? (asked in step 1)"]


def test_tokens_have_their_text_figures_and_marks(client: TestClient) -> None:
    columns = client.get(f"/{SECRET}/api/runs/0/steps/1/responses/4/tokens").json()["columns"]
    assert "".join(columns["text"]) == 'calc("3*7")\ntool: 21\nSo it is 21, né? 😀<|end|>'
    replied = "".join(text for text, sampled in zip(columns["text"], columns["sampled"], strict=True) if not sampled)
    assert replied == "tool: 21\n"
    for name in ("ratio", "rollout", "trainer", "entropy", "advantage", "staleness", "version", "marks"):
        assert [value is None for value in columns[name]] == [not sampled for sampled in columns["sampled"]]
    assert set(columns["marks"]) == {0, 1, None}
    assert "correction" in client.get(f"/{SECRET}/api/runs/0/steps/1/responses/2/tokens").json()["columns"]


def test_a_response_that_no_update_used_has_no_figures(client: TestClient) -> None:
    columns = client.get(f"/{SECRET}/api/runs/0/steps/1/responses/9/tokens").json()["columns"]
    assert {"ratio", "trainer", "marks"} & columns.keys() == set()
    assert {"rollout", "advantage", "staleness"} <= columns.keys()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("NEEDLE", [9, 11]),
        ("17 + 25?", [0, 1, 2, 3]),
        ("guess", [5, 7]),
        ("21, né? 😀", [4, 6]),
        ("NÉ? 😀", [4, 6]),
        ("numbers.\n17", [0, 1, 2, 3]),
        (HOSTILE, [8, 9, 10, 11]),
        ("absent", []),
        ("u202e", []),  # is how the file writes a character of the hostile prompt, and
        ("content", []),  # this is a key there
    ],
)
def test_texts_of_prompts_and_responses_are_searched(client: TestClient, text: str, rows: list[int]) -> None:
    assert client.get(f"/{SECRET}/api/runs/0/steps/1/search", params={"text": text}).json() == {"rows": rows}


def test_a_prompt_is_searched_as_it_is_shown(tmp_path: Path) -> None:
    made = sampled("ok", reward=1.0, advantage=1.0)
    texts = 'Say "hi".\n\nWait', "Привет, Żółw?", "back\\slash", "plain"
    write_step(tmp_path, 1, [group(i, prompt(i, text, "1"), [made]) for i, text in enumerate(texts)])
    samples = Samples(RunDirectory(tmp_path))
    for text, rows in {
        '"hi"': [0],
        ".\n\nw": [0],
        "привет, żÓłw": [1],
        "k\\s": [2],
        "n": [3],
        '"': [0],
        "\\": [2],
        "user": [],
    }.items():
        assert samples.search(1, text) == {"rows": rows}, text


def test_prompts_that_differ_late_have_different_excerpts(tmp_path: Path) -> None:
    made = sampled("ok", reward=1.0, advantage=1.0)
    rules, more = "Follow these rules. " * 20, "Solve it. " * 10
    texts = [f"{rules}Add {i} and 1" for i in range(3)] + [f"{rules}{more}Sort {word}" for word in ("b a", "d c")]
    write_step(tmp_path, 1, [group(i, prompt(i, text), [made] * 2) for i, text in enumerate(texts)])
    excerpts = Samples(RunDirectory(tmp_path)).step(1)["columns"]["excerpt"][::2]
    assert excerpts == ["…Add 0 and 1", "…Add 1 and 1", "…Add 2 and 1", "…b a", "…d c"]
    unbroken = ["句" * 300 + end for end in "甲乙"]
    write_step(tmp_path, 2, [group(i, prompt(i, text), [made]) for i, text in enumerate(unbroken)])
    assert Samples(RunDirectory(tmp_path)).step(2)["columns"]["excerpt"] == ["…甲", "…乙"]


def test_the_steps_with_a_prompt_are_found(client: TestClient) -> None:
    found = client.get(f"/{SECRET}/api/runs/0/steps/10/responses/1/history").json()
    assert found == {
        "prompt_id": "task:7",
        "steps": [{"step": 1, "rows": [0, 1, 2, 3]}, {"step": 10, "rows": [0, 1, 2, 3]}],
        "problems": [],
    }


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("steps/2", 404),
        ("steps/1/responses/12", 404),
        ("steps/1/responses/12/tokens", 404),
        ("steps/1/responses/-1", 404),
        ("steps/1?start=x", 400),
        ("steps/1?start=-1", 400),
        ("steps/1/search", 400),
        ("steps/1/search?text=" + 1001 * "x", 400),
        ("nothing", 404),
    ],
)
def test_questions_without_an_answer_are_refused(client: TestClient, path: str, code: int) -> None:
    assert client.get(f"/{SECRET}/api/runs/0/{path}").status_code == code


@pytest.mark.slow
def test_no_answer_is_larger_than_a_megabyte(tmp_path: Path) -> None:
    long = 3000 * "\u202e\x00 long "
    made = sampled(long, reward=1.0, advantage=1.0)
    hostile = replace(prompt(1, long * 20, long * 20), prompt_id=long)
    write_step(tmp_path, 1, [group(index, hostile, [made] * 8) for index in range(100)])
    with client_of(tmp_path) as client:
        for path in ("steps/1", "steps/1/responses/0", "steps/1/responses/799/tokens", "steps/1/responses/0/history"):
            answer = client.get(
                f"/{SECRET}/api/runs/0/{path}", params={"count": 10**6} if path.endswith(("1", "s")) else {}
            )
            assert answer.status_code == 200
            assert len(answer.content) <= MAX_BYTES
        assert client.get(f"/{SECRET}/api/runs/0/steps/1/responses/0/tokens").json()["end"] <= MAX_TOKENS
        search = client.get(f"/{SECRET}/api/runs/0/steps/1/search", params={"text": "long"})
        assert search.json()["rows"] == [*range(800)]


def test_row_groups_are_kept_as_long_as_they_are_small(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 1000] * 4})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    size = table.nbytes // 4
    for max_bytes, numbers in ((0, [2]), (3 * size, [1, 0, 2]), (100 * size, [3, 1, 0, 2])):
        kept = RowGroups(max_bytes)
        for number in (0, 3, 1, 0, 2):
            found = kept.row_group(tmp_path / "rows.parquet", 0, number, ("text",))
            assert found == table.slice(number, 1)
        assert [key[2] for key in kept.tables] == numbers


def test_tokens_are_shown_as_numbers_without_a_tokenizer(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [group(0, prompt(1, "p"), [sampled("ab", reward=1.0, advantage=1.0)])])
    (RunDirectory(tmp_path).sampled_rollouts / TOKENIZER_FILE).unlink()
    columns = Samples(RunDirectory(tmp_path)).tokens(1, 0)["columns"]
    assert columns["text"] == [f"⟨{token_id}⟩" for token_id in columns["id"]]


def test_a_run_that_goes_on_adds_steps(tmp_path: Path) -> None:
    one = [group(0, prompt(1, "p"), [sampled("ab", reward=1.0, advantage=1.0)])]
    write_step(tmp_path, 1, one)
    samples = Samples(RunDirectory(tmp_path))
    write_step(tmp_path, 2, one)
    assert samples.run()["steps"] == [1, 2]
    write_step(tmp_path, 1, [*one, *one])  # a resumed run repeats a step
    assert samples.step(1)["total"] == 2


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run: it has no config\.yaml; give the folder of a run"):
        opened([tmp_path])


def test_a_run_without_sampled_rollouts_says_which_key_turns_them_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with client_of(tmp_path) as client:
        found = client.get(f"/{SECRET}/api/runs/0").json()
    assert (found["name"], found["steps"]) == (tmp_path.name, [])
    assert "logging.rollouts.every_steps turns them on" in found["message"]
    with pytest.raises(UserError, match="there is nothing to export: the run has no sampled rollouts; logging"):
        export(Samples(RunDirectory(tmp_path)), tmp_path / "page.html", None)


def test_damaged_columns_of_samples_are_not_taken_for_a_file_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    samples = Samples(RunDirectory(tmp_path / "run"))
    damage(tmp_path / "run", 10)
    with pytest.raises(UserError, match=r"the sampled rollouts of step 10 are damaged \(.*\); copy their file again"):
        export(samples, tmp_path / "page.html", 10)


def test_a_damaged_step_is_named_and_leaves_the_other_steps_with_the_prompt(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run", 10)
    with client_of(tmp_path / "run") as client:
        steps = f"/{SECRET}/api/runs/0/steps"
        found = client.get(f"{steps}/1/responses/0/history").json()
        assert found["steps"] == [{"step": 1, "rows": [0, 1, 2, 3]}]
        (problem,) = found["problems"]
        assert re.fullmatch(r"the sampled rollouts of step 10 are damaged \(.*\); copy their file again", problem)
        for path in ("", "/search?text=a", "/responses/0", "/responses/0/tokens", "/responses/0/history"):
            answer = client.get(f"{steps}/10{path}")
            assert (answer.status_code, answer.text[:40]) == (400, problem[:40]), path


@pytest.mark.parametrize("text", ["", "{}", '{"model": {'])
def test_a_damaged_tokenizer_is_named_by_the_page_and_its_export(run: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    (directory.sampled_rollouts / TOKENIZER_FILE).write_text(text)
    expected = r"tokenizer\.json is not a tokenizer \(.*\); copy it again, or delete it to show tokens as their numbers"
    with pytest.raises(UserError, match=expected):
        export(Samples(directory), tmp_path / "page.html", 10)
    with client_of(directory.root) as client:
        answer = client.get(f"/{SECRET}/api/runs/0/steps/10/responses/0/tokens")
        assert answer.status_code == 400
        assert re.search(expected, answer.text)


def test_a_damaged_file_of_samples_is_named(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.sampled_rollouts.mkdir()
    file = directory.sampled_rollouts / "step-00000001.parquet"
    for data in (b"", b"PAR1" * 9):
        file.write_bytes(data)
        with pytest.raises(UserError, match=rf"{file} has no sampled rollouts \(.*Parquet.*\); copy it again"):
            export(Samples(directory), tmp_path / "page.html", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent/page.html", "must be in a folder that exists; create {root}/absent, or choose another folder"),
        ("folder", "is a folder; name a file in it, such as {root}/folder/step-10.html"),
        ("/proc/page.html", "cannot be written to (No such file or directory: /proc/page.html); choose another folder"),
        ("a" * 300, "cannot be written to (File name too long: {root}/" + "a" * 300 + "); choose another folder"),
    ],
)
def test_a_page_that_cannot_be_written_is_an_error_of_the_input(
    run: Path, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / name
    result = CliRunner().invoke(app, ["view", str(run), "--export", str(file)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --export {file} {message.format(root=tmp_path)}")


def test_the_scripts_of_an_exported_page_are_all_of_them(client: TestClient) -> None:
    page = client.get(f"/{SECRET}/").text
    names, seen = re.findall(r'src="([\w.]+)"', page), set[str]()
    while names:
        seen.add(name := names.pop())
        script = client.get(f"/{SECRET}/{name}").text
        names += [each for each in re.findall(r'from "\./([\w.]+)"', script) if each not in seen]
    assert seen == set(_MODULES)
    assert json.dumps("http") not in page
