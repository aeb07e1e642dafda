"""Says which sessions and entries a principal may see, and stores shares and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from crow.store import Access, Share, ShareAccess, Token
from crow.store.postgres.database import Sql, UsesDatabase, array_of, snapshot, transaction
from crow.store.postgres.paths import session_values
from crow.store.rows import TOKEN_COLUMNS, TOKEN_FIELDS, plain, plain_or_none, token_of
from crow.store.session_rules import check_share, is_entry_id, token_taken

# ruff: noqa: S608  # statements are put together from constants; values are parameters


_FAMILY = """
    WITH RECURSIVE family (id) AS (
        SELECT $1::text COLLATE "C" UNION SELECT s.id FROM crow.sessions s JOIN family ON s.parent_id = family.id
    )
"""


class PrincipalMethods(UsesDatabase):
    """Methods of the store for principals."""

    @snapshot
    async def access_of(self, sql: Sql, session_id: str, principal: str) -> Access | None:
        # All three subqueries always run, so that the time does not show which of them found something.
        exists, owner, shared = await sql.fetchrow(
            "SELECT (SELECT 1 FROM crow.sessions WHERE id = $1 AND deleted_ms IS NULL),"
            " (SELECT principal FROM crow.sessions WHERE id = $1 AND deleted_ms IS NULL),"
            " (SELECT access FROM crow.shares WHERE principal = $2 AND session = $1)",
            plain(session_id),
            plain(principal),
        )
        found: Access | None = "own" if owner == principal else shared
        return found if exists else None

    @snapshot
    async def sees_entries(
        self, sql: Sql, entries: Sequence[int], *, principal: str | None, session_id: str | None = None
    ) -> bool:
        wanted = set(entries)
        if not all(map(is_entry_id, wanted)):
            return False
        visible = "v.deleted_ms IS NULL AND ($2::text IS NULL OR v.id = $2) AND crow.sees($3::text, v.principal, v.id)"
        viewer = (plain_or_none(session_id), plain_or_none(principal))
        written = await sql.fetch(
            "SELECT e.id FROM crow.entries e JOIN crow.sessions v ON v.id = e.session"
            f" AND v.conversation = e.conversation WHERE e.id = ANY ($1::text::bigint[]) AND {visible}",
            array_of(sorted(wanted)),
            *viewer,
        )
        wanted -= {row[0] for row in written}
        if not wanted:
            return True
        reached = await sql.fetch(
            "WITH RECURSIVE visible (id, leaf) AS (SELECT v.id, v.leaf FROM crow.sessions v WHERE v.conversation IN"
            f" (SELECT conversation FROM crow.entries WHERE id = ANY ($1::text::bigint[])) AND {visible}),"
            " ends (id) AS (SELECT leaf FROM visible"
            " UNION SELECT m.from_leaf FROM visible JOIN crow.moves m ON m.session = visible.id"
            " UNION SELECT m.to_leaf FROM visible JOIN crow.moves m ON m.session = visible.id),"
            " reached (id) AS (SELECT id FROM ends"
            " UNION SELECT e.parent FROM reached JOIN crow.entries e ON e.id = reached.id)"
            " SELECT id FROM reached WHERE id = ANY ($1::text::bigint[])",
            array_of(sorted(wanted)),
            *viewer,
        )
        return not wanted.difference(row[0] for row in reached)

    @transaction
    async def share_session(self, sql: Sql, session_id: str, principal: str, access: ShareAccess | None) -> None:
        parent, owner = await session_values(sql, session_id, "parent_id, principal", lock=True)
        check_share(session_id, principal, parent=parent, owner=owner)
        if access is None:
            query = f"{_FAMILY} DELETE FROM crow.shares WHERE principal = $2 AND session IN (SELECT id FROM family)"
            await sql.execute(query, session_id, plain(principal))
        else:
            await sql.execute(
                f"{_FAMILY} INSERT INTO crow.shares (principal, session, access, created_ms)"
                " SELECT $2, s.id, $3, crow.now_ms() FROM crow.sessions s WHERE s.id IN (SELECT id FROM family)"
                " ON CONFLICT (principal, session) DO UPDATE SET access = excluded.access,"
                " created_ms = excluded.created_ms WHERE shares.access <> excluded.access",
                session_id,
                plain(principal),
                access,
            )

    @snapshot
    async def shares(self, sql: Sql, session_id: str) -> tuple[Share, ...]:
        rows = await sql.fetch(
            "SELECT h.session, h.principal, h.access, h.created_ms FROM crow.shares h"
            " JOIN crow.sessions s ON s.id = h.session WHERE h.session = $1 AND s.deleted_ms IS NULL"
            " ORDER BY h.principal",
            plain(session_id),
        )
        return tuple(Share(session=row[0], principal=row[1], access=row[2], created_ms=row[3]) for row in rows)

    @transaction
    async def add_token(self, sql: Sql, token: Token) -> None:
        marks = ", ".join(f"${number}" for number in range(1, len(TOKEN_FIELDS) + 1))
        values = [plain(value) if isinstance(value := getattr(token, name), str) else value for name in TOKEN_FIELDS]
        try:
            await sql.execute(f"INSERT INTO crow.tokens ({TOKEN_COLUMNS}) VALUES ({marks})", *values)
        except asyncpg.UniqueViolationError:
            raise token_taken(token.id) from None

    @snapshot
    async def token(self, sql: Sql, token_id: str) -> Token | None:
        row = await sql.fetchrow(f"SELECT {TOKEN_COLUMNS} FROM crow.tokens WHERE id = $1", plain(token_id))
        return token_of(row) if row else None

    @snapshot
    async def tokens(self, sql: Sql) -> tuple[Token, ...]:
        rows = await sql.fetch(f"SELECT {TOKEN_COLUMNS} FROM crow.tokens ORDER BY created_ms, id")
        return tuple(map(token_of, rows))

    @transaction
    async def note_token_use(self, sql: Sql, token_id: str, used_ms: int) -> None:
        await sql.execute("UPDATE crow.tokens SET used_ms = $2 WHERE id = $1", plain(token_id), used_ms)

    @transaction
    async def revoke_token(self, sql: Sql, token_id: str) -> bool:
        query = "UPDATE crow.tokens SET revoked_ms = crow.now_ms() WHERE id = $1 AND revoked_ms IS NULL RETURNING id"
        return await sql.fetchval(query, plain(token_id)) is not None
