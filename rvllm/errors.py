"""Every error a user, a file or a driver can cause. Knows nothing of where it is shown.

RvllmError                     carries `message` and, where there is a way out, `hint`
├── BadRequest                 one request is wrong: HTTP 400; `param` names the field
│   └── PromptTooLong          the prompt does not fit the context
├── StartError                 the program cannot start: exit code 1
│   ├── ModelNotFound          no such folder, file, cached or default model
│   ├── ConfigError            config.json is missing, broken, or asks for what we do not do
│   ├── CheckpointError        a weight file is missing, truncated, inconsistent, or in a refused format
│   ├── TokenizerError         no tokenizer, or a broken one
│   └── DeviceError            no driver, no device, not enough memory
├── WrongOutput                a benchmark's output or speed cannot be: no figure is printed, exit code 1
└── EngineError                the engine failed while serving; requests in flight end with it
    └── EngineDied             the engine's process, or the link to it, is gone
"""

from __future__ import annotations


class RvllmError(Exception):
    """`message` says what, the limit and what was given; `hint` says the way out."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. hint: {self.hint}" if self.hint else self.message


class BadRequest(RvllmError):
    """A request cannot be served as asked; `param` is the offending field's name, or None."""

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class PromptTooLong(BadRequest):
    """The prompt alone leaves no room in the context."""


class StartError(RvllmError):
    """The program cannot start; the command line prints it in a few lines and exits with 1."""


class ModelNotFound(StartError):
    """The named model is not on this machine and was not fetched."""


class ConfigError(StartError):
    """config.json (or GGUF metadata) is missing, broken, or asks for something we do not do."""


class CheckpointError(StartError):
    """A weight file is missing, truncated, inconsistent or in a refused format."""


class TokenizerError(StartError):
    """There is no tokenizer, or it cannot be read."""


class DeviceError(StartError):
    """The device or its driver cannot be used."""


class WrongOutput(RvllmError):
    """What the engine put out, or how fast, cannot be right; a benchmark refuses to print a figure."""


class EngineError(RvllmError):
    """The engine failed while serving."""


class EngineDied(EngineError):
    """The engine's process, or the link to it, is gone; nothing more comes from it."""
