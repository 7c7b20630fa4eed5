"""`budwood view`: runs in the browser."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def view(
        directory: Path = Path("runs"),
        *,
        port: int = 7777,
        host: str = "127.0.0.1",
        token: str | None = None,
        model: str | None = None,
    ) -> int:
        """Serve the pages of all runs on this machine: read-only, with live progress. Ctrl-C ends it.

        Parameters
        ----------
        directory
            Where the runs are, or one run: then the page opens at it.
        port
            Port to listen on; 0 takes any that is free.
        host
            Address to listen on; any but a loopback address needs a token.
        token
            A secret of 16 characters or more that visitors have to bring; auto makes one and prints it.
        model
            A model to ask typed texts about runs that hold an index of gradients.
        """
        import secrets
        from urllib.parse import quote

        from budwood.errors import ConfigError, StoreError

        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as e:
            raise ConfigError("`budwood view` needs two small packages: pip install 'budwood[view]'.") from e
        from budwood.report.asking import asker
        from budwood.report.view import Door, open_socket, serve

        if not directory.is_dir():
            raise StoreError(
                f"There is no directory '{directory}', so there are no runs to see. Make one: budwood finetune "
                "tiny-bert --task tiny-sentiment, or budwood demo."
            )
        one = (directory / "run.json").exists()
        secret = secrets.token_urlsafe(24) if token == "auto" else token
        door = Door(host, port, secret)
        sock = open_socket(host, port)
        name = f"[{host}]" if ":" in host else host
        suffix = f"?token={secret}" if secret else ""
        at = f"#view=runs&open={quote(directory.resolve().name)}" if one else ""
        print(f"http://{name}:{sock.getsockname()[1]}/{suffix}{at}   (Ctrl-C ends it)", flush=True)
        if one:
            print(f"  {directory} is a run; all runs of {directory.resolve().parent.name} are served", flush=True)
        serve(directory.resolve().parent if one else directory, door, sock, asker(model) if model else None)
        return 0
