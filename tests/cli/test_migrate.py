"""Flask-Migrate: the tables come with the app's next revision, and the one after that is empty."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests import servers

ROOT = Path(__file__).parents[2]

APP = """
import os

import sqlalchemy as sa
from flask import Flask
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy

from flask_idempotent import Idempotent, idempotent

bind = os.environ.get("BIND")
db = SQLAlchemy(metadata=sa.MetaData(schema=os.environ.get("SCHEMA")))


class Order(db.Model):
    __bind_key__ = bind
    id = db.Column(db.Integer, primary_key=True)


app = Flask(__name__)
app.config["IDEMPOTENT_REDIS_URL"] = os.environ["REDIS"]
if bind:
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite:///" + os.path.abspath("other.sqlite")
    app.config["SQLALCHEMY_BINDS"] = {bind: os.environ["DATABASE"]}
    app.config["IDEMPOTENT_BIND_KEY"] = bind
else:
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE"]
db.init_app(app)
Idempotent(app, db=db)
Migrate(app, db, compare_server_default=True, include_schemas="SCHEMA" in os.environ)


@app.post("/orders")
@idempotent(durable="transaction")
def create_order():
    order = Order()
    db.session.add(order)
    db.session.commit()
    return {"id": order.id}, 201
"""

# The commands of one app, in one process: `flask db ...` as the shell would call them.
FLOW = """
import os
from pathlib import Path

import sqlalchemy as sa
from flask.cli import cli


def flask(*arguments):
    cli.main(["--app", "app", *arguments], standalone_mode=False)


flask("db", "init", *(["--multidb"] if "BIND" in os.environ else []))
flask("db", "migrate", "-m", "first")
flask("db", "upgrade")
flask("db", "migrate", "-m", "second")
revisions = list(Path("migrations/versions").glob("*.py"))
assert len(revisions) == 1, [path.read_text() for path in revisions]
assert revisions[0].read_text().count("create_table('idempotency_") == 3

from app import Order, app, db

client = app.test_client()
key = {"Idempotency-Key": "2a0f3a0a-64a5-4a3b-93d5-0f3b7a3ac8a5"}
first = client.post("/orders", json={}, headers=key)
again = client.post("/orders", json={}, headers=key)
assert (first.status_code, again.status_code) == (201, 201), (first.text, again.text)
assert again.headers["Idempotent-Replayed"] == "true"
with app.app_context():
    assert db.session.scalar(sa.select(sa.func.count()).select_from(Order)) == 1

flask("db", "downgrade", "base")
"""


def migrate(directory: Path, database: str, redis_url: str, **environment: str) -> None:
    (directory / "app.py").write_text(APP)
    (directory / "flow.py").write_text(FLOW)
    done = subprocess.run(
        [sys.executable, "flow.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE": database, "REDIS": redis_url, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No changes in schema detected" in done.stderr


@contextlib.contextmanager
def tables_of(url: str, schema: str | None = None) -> Iterator[set[str]]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield set(sa.inspect(connection).get_table_names(schema))


def test_the_first_revision_has_the_tables_and_the_second_nothing(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    migrate(tmp_path, database_url, redis_url)
    with tables_of(database_url) as left:
        assert left == {"alembic_version"}


def test_with_the_dialect_that_is_named_mariadb(mariadb_url: str, redis_url: str, tmp_path: Path) -> None:
    with servers.fresh_database(mariadb_url) as url:
        migrate(tmp_path, url.replace("mysql+", "mariadb+"), redis_url)


def test_the_tables_are_those_of_the_bind(sqlite_url: str, redis_url: str, tmp_path: Path) -> None:
    migrate(tmp_path, sqlite_url, redis_url, BIND="shop")
    with tables_of(f"sqlite:///{tmp_path / 'other.sqlite'}") as left:
        assert left == {"alembic_version"}


def test_in_a_schema_of_its_own(postgres_url: str, redis_url: str, tmp_path: Path) -> None:
    with servers.fresh_database(postgres_url) as url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.execute(sa.schema.CreateSchema("shop"))
        migrate(tmp_path, url, redis_url, SCHEMA="shop")
        with tables_of(url, "shop") as left:
            assert left == set()


@pytest.mark.parametrize("schema", [None, "shop"])
def test_an_app_with_its_own_metadata(postgres_url: str, schema: str | None) -> None:
    from flask_idempotent.stores.models import add_tables

    metadata = sa.MetaData(schema=schema)
    tables = add_tables(metadata)
    assert add_tables(metadata) == tables
    assert {table.schema for table in metadata.tables.values()} == {schema}
    with servers.fresh_database(postgres_url) as url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            if schema:
                connection.execute(sa.schema.CreateSchema(schema))
            metadata.create_all(connection)
        with tables_of(url, schema) as made:
            assert made == {"idempotency_keys", "idempotency_responses", "idempotency_steps"}
