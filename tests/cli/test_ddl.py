"""What `flask idempotent ddl` prints runs as it is, and makes the tables that the package declares."""

import contextlib
import datetime
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from click.testing import CliRunner
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.cli import idempotent as commands
from flask_idempotent.stores.models import Tables, add_tables
from tests import servers
from tests.web.kit import assert_problem, assert_replay, keyed

#: Both names of the dialect for a MariaDB: which one an app uses depends on its URL.
DIALECTS = {"postgresql": ["postgresql"], "mariadb": ["mariadb", "mysql"], "sqlite": ["sqlite"]}
TODAY = datetime.datetime.now(datetime.timezone.utc).date()


def ddl(dialect: str, *options: str) -> str:
    done = CliRunner().invoke(commands, ["ddl", "--dialect", dialect, *options])
    assert done.exit_code == 0, done.output
    return done.output


def statements(text: str) -> list[str]:
    """Split as the simplest tools do it; comments stay where they are."""
    *parts, rest = text.split(";")
    assert not rest.strip()
    return parts


def examples(text: str) -> list[str]:
    """The statements that stand in comments, as instructions: indented there."""
    return re.findall(r"^--     (.+)$", text, re.MULTILINE)


@contextlib.contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection


def run(url: str, parts: list[str]) -> None:
    with connected(url) as connection:
        for part in parts:
            connection.exec_driver_sql(part)


def differences(url: str, metadata: sa.MetaData) -> list[Any]:
    """What Alembic would change in the database; partitions, which PostgreSQL has as tables, left out."""

    def include_name(name: str | None, kind: str, parents: object) -> bool:
        return kind != "table" or not str(name).startswith("idempotency_responses_p")

    options = {"compare_type": True, "compare_server_default": True, "include_name": include_name}
    with connected(url) as connection:
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def described(url: str) -> dict[str, Any]:
    """The tables as the database has them: also what Alembic doesn't compare."""
    with connected(url) as connection:
        inspector = sa.inspect(connection)
        return {
            name: {
                "columns": [{**column, "type": repr(column["type"])} for column in inspector.get_columns(name)],
                "key": inspector.get_pk_constraint(name)["constrained_columns"],
                "indexes": sorted((i["name"], i["column_names"], i["unique"]) for i in inspector.get_indexes(name)),
                "checks": sorted((c["name"], c["sqltext"]) for c in inspector.get_check_constraints(name)),
                "options": inspector.get_table_options(name),
            }
            for name in inspector.get_table_names()
            if not name.startswith("idempotency_responses_p")
        }


def test_what_is_printed_makes_the_declared_tables(database_url: str, request: pytest.FixtureRequest) -> None:
    for dialect in DIALECTS[request.node.callspec.params["database_url"]]:
        servers.drop_all_tables(database_url)
        run(database_url, statements(ddl(dialect)))
        metadata = sa.MetaData()
        add_tables(metadata)
        assert differences(database_url, metadata) == []

        printed = described(database_url)
        assert printed["idempotency_keys"]["key"] == ["tenant_id", "endpoint", "key_digest"]
        assert [name for name, _ in printed["idempotency_keys"]["checks"]] == ["idempotency_keys_status"]
        assert len(printed["idempotency_keys"]["indexes"]) == 2
        servers.drop_all_tables(database_url)
        engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        metadata.create_all(engine)
        assert described(database_url) == printed


def test_a_difference_would_be_seen(database_url: str) -> None:
    add_tables(metadata := sa.MetaData())
    metadata.create_all(sa.create_engine(database_url, poolclass=sa.NullPool))
    assert differences(database_url, metadata) == []
    metadata.tables["idempotency_keys"].append_column(sa.Column("more", sa.Integer))
    assert differences(database_url, metadata) != []


def test_states_are_checked(database_url: str, request: pytest.FixtureRequest) -> None:
    run(database_url, statements(ddl(request.node.callspec.params["database_url"])))
    tables = add_tables(sa.MetaData())
    with connected(database_url) as connection:
        connection.execute(sa.insert(tables.keys).values(a_key()))
        with pytest.raises((sa.exc.IntegrityError, sa.exc.OperationalError)):  # MariaDB's error 4025 is either
            connection.execute(sa.insert(tables.keys).values(a_key(status="unheard-of")))


def test_texts_are_compared_byte_by_byte_on_mariadb(mariadb_url: str) -> None:
    with servers.fresh_database(mariadb_url) as url:
        run(url, statements(ddl("mariadb")))
        tables = add_tables(sa.MetaData())
        with connected(url) as connection:
            for tenant in ("acme", "ACME", "açme"):
                connection.execute(sa.insert(tables.keys).values(a_key(tenant_id=tenant, key_digest="0" * 64)))


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb", "sqlite"])
@pytest.mark.parametrize("partitioned", [False, True])
def test_every_part_is_one_statement_with_its_comments_in_front(dialect: str, partitioned: bool) -> None:
    if partitioned and dialect == "sqlite":
        return
    text = ddl(dialect, *["--partitioned"] if partitioned else [])
    header, _, rest = text.partition("\n\n")
    assert all(line.startswith("--") for line in header.splitlines())
    assert "--" not in rest
    assert ";" not in header
    assert header.count("'") % 2 == 0
    assert "milliseconds since 1970-01-01 UTC" in header
    for part in statements(rest):
        assert re.match(r"CREATE (TABLE|INDEX) idempotency_\w+ ", part.strip())
    assert not re.search(r"[ \t]$", text, re.MULTILINE)
    assert ddl(dialect, *["--partitioned"] if partitioned else []) == text


def test_sqlite_has_no_partitions() -> None:
    done = CliRunner().invoke(commands, ["ddl", "--dialect", "sqlite", "--partitioned"])
    assert done.exit_code == 2
    assert "SQLite has no partitions: leave --partitioned out" in done.output


def a_key(**values: Any) -> dict[str, Any]:
    return {
        "tenant_id": "",
        "endpoint": "orders",
        "key_digest": uuid.uuid4().hex * 2,
        "recipe": "1",
        "request_hash": "0" * 64,
        "status": "in_progress",
        "lock_version": 1,
        "claim_token": "0" * 32,
        "created_at": 1,
        **values,
    }


def an_answer(**values: Any) -> dict[str, Any]:
    return {
        "tenant_id": "",
        "endpoint": "orders",
        "key_digest": uuid.uuid4().hex * 2,
        "lock_version": 1,
        "headers": b"[]",
        "body": b"\0\xff",
        "kind": "full",
        **values,
    }


# Partitions


@pytest.fixture(params=["postgresql", "mariadb"])
def partitioned(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """URL of a database with partitions, made by what is printed; and that text."""
    text = ddl(request.param, "--partitioned")
    with servers.fresh_database(request.getfixturevalue(servers.DATABASES[request.param])) as url:
        run(url, statements(text))
        yield url, text


def declared() -> tuple[sa.MetaData, Tables]:
    metadata = sa.MetaData()
    return metadata, add_tables(metadata, partitioned=True)


def test_partitioned_tables_are_the_declared_ones(partitioned: tuple[str, str]) -> None:
    url, _ = partitioned
    assert differences(url, declared()[0]) == []
    add_tables(unpartitioned := sa.MetaData())  # what `init_app` adds; Alembic doesn't compare primary keys
    assert differences(url, unpartitioned) == []
    assert described(url)["idempotency_responses"]["key"] == ["tenant_id", "endpoint", "key_digest", "expires_day"]
    assert described(url)["idempotency_keys"]["key"] == ["tenant_id", "endpoint", "key_digest"]


def test_answers_of_the_next_days_have_a_partition(partitioned: tuple[str, str]) -> None:
    url, text = partitioned
    _, tables = declared()
    another, *_ = examples(text)
    insert = sa.insert(tables.responses)
    with connected(url) as connection:
        for ahead in range(11):  # completed in 8 days, kept for 48 hours
            connection.execute(insert.values(an_answer(expires_day=TODAY + timedelta(days=ahead))))
        with pytest.raises(sa.exc.DBAPIError):
            connection.execute(insert.values(an_answer(expires_day=TODAY + timedelta(days=12))))
        connection.exec_driver_sql(another)
        connection.execute(insert.values(an_answer(expires_day=TODAY + timedelta(days=11))))


def test_a_partition_can_be_dropped(partitioned: tuple[str, str]) -> None:
    url, text = partitioned
    _, tables = declared()
    _, *drop = examples(text)
    with connected(url) as connection:
        for ahead in range(2):
            connection.execute(sa.insert(tables.responses).values(an_answer(expires_day=TODAY + timedelta(days=ahead))))
        for statement in drop:
            connection.exec_driver_sql(statement)
        assert connection.scalars(sa.select(tables.responses.c.expires_day)).all() == [TODAY + timedelta(days=1)]


def test_a_key_stays_unique_over_all_days(partitioned: tuple[str, str]) -> None:
    url, _ = partitioned
    _, tables = declared()
    key = a_key(expires_day=TODAY)
    with connected(url) as connection:
        connection.execute(sa.insert(tables.keys).values(key))
        with pytest.raises(sa.exc.IntegrityError):
            connection.execute(sa.insert(tables.keys).values({**key, "expires_day": TODAY + timedelta(days=1)}))


def shop(url: str, redis_url: str, **settings: Any) -> tuple[Flask, SQLAlchemy, type]:
    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=url, SQLALCHEMY_ENGINE_OPTIONS={"poolclass": sa.NullPool})
    app.config.update(IDEMPOTENT_REDIS_URL=redis_url, **settings)
    db = SQLAlchemy(app)

    class Order(db.Model):  # type: ignore[name-defined,misc]
        id = db.Column(db.Integer, primary_key=True)

    Idempotent(app, db=db)

    @app.post("/orders")
    @idempotent(durable="transaction")
    def create_order() -> Any:
        db.session.add(order := Order())
        db.session.commit()
        return {"id": order.id}, 201

    with app.app_context():
        db.metadata.create_all(db.engine, tables=[Order.__table__])
    return app, db, Order


def count(app: Flask, db: SQLAlchemy, model: type) -> int:
    with app.app_context():
        return int(db.session.scalar(sa.select(sa.func.count()).select_from(model)))


def test_a_durable_route_works_on_partitions(partitioned: tuple[str, str], redis_url: str) -> None:
    url, _ = partitioned
    app, db, order = shop(url, redis_url)
    client, headers = app.test_client(), keyed()
    first = client.post("/orders", json={}, headers=headers)
    assert first.status_code == 201
    assert_replay(first, client.post("/orders", json={}, headers=headers))
    with redis.Redis.from_url(redis_url) as front:
        front.flushdb()
        assert_replay(first, client.post("/orders", json={}, headers=headers))
        assert client.post("/orders", json={"another": 1}, headers=headers).status_code == 422
        # An answer whose partition is gone: done, and nothing runs again.
        with connected(url) as connection:
            day = connection.scalar(sa.select(declared()[1].keys.c.expires_day))
        if url.startswith("postgresql"):
            run(url, [f"DROP TABLE idempotency_responses_p{day:%Y%m%d}"])
        else:
            run(url, [f"ALTER TABLE idempotency_responses DROP PARTITION p{day:%Y%m%d}"])
        front.flushdb()
    again = client.post("/orders", json={}, headers=headers)
    assert_problem(again, "response-unavailable", more={"original_status"})
    assert count(app, db, order) == 1


def test_without_a_partition_the_work_is_rolled_back(partitioned: tuple[str, str], redis_url: str) -> None:
    url, _ = partitioned
    app, db, order = shop(url, redis_url, IDEMPOTENT_TTL=timedelta(days=30))
    client, headers = app.test_client(), keyed()
    assert_problem(client.post("/orders", json={}, headers=headers), "store-unavailable")
    assert count(app, db, order) == 0
    day = (datetime.datetime.now(datetime.timezone.utc) + timedelta(days=30)).date()
    end = day + timedelta(days=1)
    if url.startswith("postgresql"):
        run(
            url,
            [
                f"CREATE TABLE idempotency_responses_p{day:%Y%m%d} PARTITION OF idempotency_responses "
                f"FOR VALUES FROM ('{day}') TO ('{end}')"
            ],
        )
    else:
        run(url, [f"ALTER TABLE idempotency_responses ADD PARTITION (PARTITION p1 VALUES LESS THAN ('{end}'))"])
    first = client.post("/orders", json={}, headers=headers)
    assert first.status_code == 201
    assert_replay(first, client.post("/orders", json={}, headers=headers))
    assert count(app, db, order) == 1


# The command itself


def flask(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FLASK_", "IDEMPOTENT_"))}
    return subprocess.run(
        [sys.executable, "-m", "flask", *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_flask_finds_the_command_without_an_app(tmp_path: Path) -> None:
    done = flask(tmp_path, "idempotent", "ddl", "--dialect", "sqlite")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ddl("sqlite")


def test_flask_finds_the_command_in_an_app_whose_redis_is_away(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from flask import Flask\n"
        "from flask_idempotent import Idempotent\n"
        "app = Flask(__name__)\n"
        "app.config['IDEMPOTENT_REDIS_URL'] = 'redis://127.0.0.1:1/0'\n"
        "Idempotent(app)\n"
    )
    done = flask(tmp_path, "idempotent", "--help")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  ddl  Print the CREATE statements", done.stdout, re.MULTILINE)
    assert flask(tmp_path, "idempotent", "ddl", "--dialect", "postgresql").returncode == 0
