-- A session belongs to a principal: somebody who connects to `crow serve` with a token. NULL is the local user. Aliases
-- are unique for each principal.
ALTER TABLE crow.sessions ADD COLUMN principal text COLLATE "C" CHECK (principal <> '');
ALTER TABLE crow.sessions DROP CONSTRAINT sessions_alias_key;
CREATE UNIQUE INDEX sessions_by_alias ON crow.sessions (coalesce(principal, ''), alias) WHERE alias IS NOT NULL;
CREATE INDEX sessions_of_principal ON crow.sessions (principal) WHERE principal IS NOT NULL AND deleted_ms IS NULL;

-- Sessions that other principals may read, or read and write. The sub-agents of a shared session have rows of their own.
CREATE TABLE crow.shares (
    principal text COLLATE "C" NOT NULL CHECK (principal <> ''),
    session text COLLATE "C" NOT NULL REFERENCES crow.sessions (id) ON DELETE CASCADE,
    access text NOT NULL CHECK (access IN ('read', 'write')),
    created_ms bigint NOT NULL,
    PRIMARY KEY (principal, session)
);
CREATE INDEX shares_by_session ON crow.shares (session);

-- Tokens for `crow serve`. `hash` is the sha256 (hex) of the secret, which is stored nowhere. Times are Unix milliseconds.
CREATE TABLE crow.tokens (
    id text COLLATE "C" PRIMARY KEY,
    principal text COLLATE "C" NOT NULL CHECK (principal <> ''),
    label text NOT NULL DEFAULT '',
    hash text NOT NULL,
    created_ms bigint NOT NULL,
    expires_ms bigint,
    used_ms bigint,
    revoked_ms bigint
);

-- Whether a principal sees a session: it owns it or shares it. NULL sees all.
CREATE FUNCTION crow.sees(viewer text, owner text, session text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT viewer IS NULL OR owner = viewer
        OR EXISTS (SELECT 1 FROM crow.shares h WHERE h.principal = viewer AND h.session = sees.session)
$$;
