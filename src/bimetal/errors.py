"""Every error that bimetal raises on purpose.

    BimetalError
    ├── ConfigError        a file, flag or name that the user gave: names the value, the limit, the next step
    ├── InfeasibleError    no plan fits: names the binding constraint and what is missing
    ├── RequestError       one generation request is wrong; becomes an HTTP 4xx
    └── EngineError        serving broke
        ├── LinkError      a connection between two processes broke or was refused
        └── StageError     a stage failed while loading or running

The message is written for the person who can act on it. The command line prints it without a traceback.
"""


class BimetalError(Exception):
    """Root of the tree above."""


class ConfigError(BimetalError):
    """A file, flag or name that the user gave is wrong."""


class InfeasibleError(BimetalError):
    """No plan satisfies the constraints."""


class RequestError(BimetalError):
    """One generation request is wrong.

    `param` names the field at fault, as OpenAI's error object does; `code` is its machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(BimetalError):
    """Serving broke; the request at hand gets a 5xx."""


class LinkError(EngineError):
    """A connection between two processes broke, or its peer was refused."""


class StageError(EngineError):
    """A stage failed while loading or running."""
