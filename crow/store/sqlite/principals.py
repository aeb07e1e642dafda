"""Says which sessions and entries a principal may see, and stores shares and tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from sqlite3 import Connection, IntegrityError

from crow.store import Access, Share, ShareAccess, Token
from crow.store.rows import TOKEN_COLUMNS, token_of
from crow.store.session_rules import check_share, is_entry_id, token_taken
from crow.store.sqlite.database import UsesDatabase, now_ms, snapshot, transaction
from crow.store.sqlite.paths import session_values
from crow.store.sqlite.search import seen_in

# ruff: noqa: S608  # statements are put together from constants; values are parameters


class PrincipalMethods(UsesDatabase):
    """Methods of the store for principals."""

    @snapshot(raise_if_moved=True)
    def access_of(self, sql: Connection, session_id: str, principal: str) -> Access | None:
        # All three subqueries always run, so that the time does not show which of them found something.
        exists, owner, shared = sql.execute(
            "SELECT (SELECT 1 FROM sessions WHERE id = :id AND deleted_ms IS NULL),"
            " (SELECT principal FROM sessions WHERE id = :id AND deleted_ms IS NULL),"
            " (SELECT access FROM shares WHERE principal = :principal AND session = :id)",
            {"id": session_id, "principal": principal},
        ).fetchone()
        found: Access | None = "own" if owner == principal else shared
        return found if exists else None

    @snapshot()
    def sees_entries(
        self, sql: Connection, entries: Sequence[int], *, principal: str | None, session_id: str | None = None
    ) -> bool:
        wanted = set(entries)
        if not all(map(is_entry_id, wanted)):
            return False
        values: dict[str, object] = {"ids": json.dumps(sorted(wanted)), "seen_by": principal, "session": session_id}
        visible = f"v.deleted_ms IS NULL AND (:session IS NULL OR v.id = :session) AND {seen_in('v')}"
        written = sql.execute(
            "SELECT e.id FROM entries e JOIN sessions v ON v.id = e.session AND v.conversation = e.conversation"
            f" WHERE e.id IN (SELECT value FROM json_each(:ids)) AND {visible}",
            values,
        )
        wanted -= {entry for (entry,) in written}
        if not wanted:
            return True
        values["ids"] = json.dumps(sorted(wanted))
        reached = sql.execute(
            "WITH RECURSIVE visible (id, leaf) AS (SELECT v.id, v.leaf FROM sessions v WHERE v.conversation IN"
            f" (SELECT conversation FROM entries WHERE id IN (SELECT value FROM json_each(:ids))) AND {visible}),"
            " reached (id) AS (SELECT leaf FROM visible"
            " UNION SELECT m.from_leaf FROM visible JOIN moves m ON m.session = visible.id"
            " UNION SELECT m.to_leaf FROM visible JOIN moves m ON m.session = visible.id"
            " UNION SELECT e.parent FROM reached JOIN entries e ON e.id = reached.id)"
            " SELECT e.id FROM entries e WHERE e.id IN (SELECT value FROM json_each(:ids))"
            " AND e.id IN (SELECT id FROM reached)",
            values,
        )
        return not wanted.difference(entry for (entry,) in reached)

    @transaction()
    def share_session(self, sql: Connection, session_id: str, principal: str, access: ShareAccess | None) -> None:
        parent, owner = session_values(sql, session_id, "parent_id, principal")
        check_share(session_id, principal, parent=parent, owner=owner)
        values = {"session": session_id, "principal": principal, "access": access, "now": now_ms()}
        family = (
            "WITH RECURSIVE family (id) AS"
            " (SELECT :session UNION SELECT s.id FROM sessions s JOIN family ON s.parent_id = family.id)"
        )
        if access is None:
            sql.execute(f"{family} DELETE FROM shares WHERE principal = :principal AND session IN family", values)
        else:
            sql.execute(
                f"{family} INSERT INTO shares (principal, session, access, created_ms)"
                " SELECT :principal, id, :access, :now FROM family WHERE true"
                " ON CONFLICT DO UPDATE SET access = excluded.access, created_ms = excluded.created_ms"
                " WHERE access <> excluded.access",
                values,
            )

    @snapshot()
    def shares(self, sql: Connection, session_id: str) -> tuple[Share, ...]:
        rows = sql.execute(
            "SELECT h.session, h.principal, h.access, h.created_ms FROM shares h JOIN sessions s ON s.id = h.session"
            " WHERE h.session = ? AND s.deleted_ms IS NULL ORDER BY h.principal",
            (session_id,),
        ).fetchall()
        return tuple(Share(session=row[0], principal=row[1], access=row[2], created_ms=row[3]) for row in rows)

    @transaction()
    def add_token(self, sql: Connection, token: Token) -> None:
        try:
            sql.execute(
                f"INSERT INTO tokens ({TOKEN_COLUMNS}) VALUES (:{TOKEN_COLUMNS.replace(', ', ', :')})", asdict(token)
            )
        except IntegrityError:
            raise token_taken(token.id) from None

    @snapshot()
    def token(self, sql: Connection, token_id: str) -> Token | None:
        row = sql.execute(f"SELECT {TOKEN_COLUMNS} FROM tokens WHERE id = ?", (token_id,)).fetchone()
        return token_of(row) if row else None

    @snapshot()
    def tokens(self, sql: Connection) -> tuple[Token, ...]:
        rows = sql.execute(f"SELECT {TOKEN_COLUMNS} FROM tokens ORDER BY created_ms, id").fetchall()
        return tuple(map(token_of, rows))

    @transaction()
    def note_token_use(self, sql: Connection, token_id: str, used_ms: int) -> None:
        sql.execute("UPDATE tokens SET used_ms = ? WHERE id = ?", (used_ms, token_id))

    @transaction()
    def revoke_token(self, sql: Connection, token_id: str) -> bool:
        query = "UPDATE tokens SET revoked_ms = ? WHERE id = ? AND revoked_ms IS NULL"
        return sql.execute(query, (now_ms(), token_id)).rowcount > 0
