from __future__ import annotations

from forerun.client.urls import hide_credentials


def test_a_password_is_hidden_to_its_last_at_sign():
    hidden = hide_credentials("no file https://user:p@ss@host/path, nor a@b")
    assert "user" not in hidden and "ss" not in hidden
    assert hidden.endswith("@host/path, nor a@b")
