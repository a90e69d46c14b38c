"""Where the server is, and schemas that every client asks for."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

URL = os.environ.get("CLIENTS_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("CLIENTS_MODEL", "zoo:code-40m")
KEY = "none"
PROMPT = "def add(a, b):"


class City(BaseModel):
    """A city.

    The served model continues code and follows no instructions, so that the answer has the form of
    the schema only if the server applies the schema.
    """

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome"] = Field(description="its name")
    is_capital: bool
    size: Literal["small", "large"]
