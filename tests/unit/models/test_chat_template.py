"""Chat templates are rendered as transformers renders them, within limits."""

from __future__ import annotations

import pytest
from tests import tiny

from forerun.models import chat_template
from forerun.models.chat_template import TemplateProcess, TemplateRefused
from forerun.models.tokenizers import adopt

MESSAGES = [
    {"role": "system", "content": "Be brief. \u00e9"},
    {"role": "user", "content": "  Hi <b> "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye", "name": None},
]
TEMPLATES = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "{%- for m in messages -%}\n  {%- if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{{ m | tojson }}\n{% endfor %}\n",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages[3] | tojson(indent=2) }}{{ tools is none }}{{ bos_token is defined }}",
    "{% macro line(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ line(m) }}"
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("with_answer_begun", [True, False])
def test_text_is_that_of_transformers(template, with_answer_begun):
    backend = tiny.backend(("<chat>",))
    backend.chat_template = template
    expected = backend.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=with_answer_begun
    )
    found = adopt(backend).render_chat(MESSAGES, with_answer_begun=with_answer_begun)
    assert found == expected
    assert found


LOOP = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}"
)


def test_a_template_that_loops_is_stopped():
    with pytest.raises(TemplateRefused, match="more than 1 s"):
        TemplateProcess().render(LOOP, {}, max_seconds=1)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 10000000000 }}", "more than 512 MiB"),
        ("{{ '%09999999999d' | format(1) }}", "MiB|Error"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "exceeds .* characters"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
    ],
)
def test_a_template_that_fails_says_why(template, message):
    with pytest.raises(TemplateRefused, match=message):
        TemplateProcess().render(template, {"messages": []}, max_seconds=60)


def test_one_process_renders_again_and_again():
    process = TemplateProcess()
    found = []
    for n in range(3):
        assert process.render("{{ n }}\u2028\n", {"n": n}) == f"{n}\u2028"
        found.append(process._child.pid)
    assert len(set(found)) == 1
    with pytest.raises(TemplateRefused, match="more than 1 s"):
        process.render(LOOP, {}, max_seconds=1)
    assert process.render("{{ n }}", {"n": 4}) == "4"
    assert process._child.pid != found[0]


def test_the_limit_counts_the_time_of_one_template():
    process = TemplateProcess()
    for _ in range(12):  # more than the limit together, each a tenth of it
        short = "{% for i in range(900) %}{% for j in range(900) %}{% endfor %}{% endfor %}a"
        assert process.render(short, {}, max_seconds=1) == "a"


def test_the_folder_of_the_caller_is_not_searched(tmp_path, monkeypatch):
    """A model folder may hold a file called jinja2.py."""
    (tmp_path / "jinja2.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert TemplateProcess().render("{{ 1 + 1 }}", {}) == "2"


def test_the_environment_is_also_used_here():
    """Covered in this process too, where coverage and type checks see it."""
    assert chat_template.rendered("{{ a }}{{ strftime_now('') }}", {"a": 3}) == "3"
