-- Conversations are trees of entries; a session is a pointer into one. JSON is kept as text: jsonb refuses \u0000.
CREATE TABLE crow.conversations (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_ms bigint NOT NULL
);

-- The only mutable rows. Each claim of a turn raises `epoch`; an owner with an older epoch may not write.
CREATE TABLE crow.sessions (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text COLLATE "C" NOT NULL UNIQUE,
    conversation bigint NOT NULL,
    leaf bigint,
    forked_from text COLLATE "C",
    parent_id text COLLATE "C",
    alias text UNIQUE,
    cwd text NOT NULL,
    additional_directories text NOT NULL DEFAULT '[]',
    title text,
    folded_title text,
    title_by_user boolean NOT NULL DEFAULT false,
    model text NOT NULL,
    mode text NOT NULL,
    permissions text NOT NULL DEFAULT '[]',
    config text NOT NULL DEFAULT '{}',
    metadata text NOT NULL DEFAULT '{}',
    calibration float8 NOT NULL DEFAULT 1.0,
    entries bigint NOT NULL DEFAULT 0,
    tokens_in bigint NOT NULL DEFAULT 0,
    tokens_out bigint NOT NULL DEFAULT 0,
    tokens_cached bigint NOT NULL DEFAULT 0,
    cost float8 NOT NULL DEFAULT 0.0,
    files_changed bigint NOT NULL DEFAULT 0,
    lines_added bigint NOT NULL DEFAULT 0,
    lines_removed bigint NOT NULL DEFAULT 0,
    newest_entry bigint NOT NULL DEFAULT 0,
    has_prompt boolean NOT NULL DEFAULT false,
    state text NOT NULL DEFAULT 'idle' CHECK (state IN ('idle', 'running')),
    -- Null while a turn runs: so no index changes with each entry.
    listed bigint GENERATED ALWAYS AS (CASE WHEN state = 'idle' THEN newest_entry END) STORED,
    owner text NOT NULL DEFAULT '',
    epoch bigint NOT NULL DEFAULT 0,
    turn bigint NOT NULL DEFAULT 0,
    created_ms bigint NOT NULL,
    updated_ms bigint NOT NULL,
    archived boolean NOT NULL DEFAULT false,
    deleted_ms bigint
) WITH (fillfactor = 70);
CREATE INDEX sessions_listed ON crow.sessions (archived, listed, id)
    WHERE has_prompt AND parent_id IS NULL AND deleted_ms IS NULL;
CREATE INDEX sessions_by_parent ON crow.sessions (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_by_conversation ON crow.sessions (conversation);
CREATE INDEX sessions_deleted ON crow.sessions (conversation) WHERE deleted_ms IS NOT NULL;

-- Insert-only. `body` is JSON; one over 32 KiB is the blob `body_blob` instead. `call_entry` and `call_index` say which
-- call a started, file or tool entry belongs to.
CREATE TABLE crow.entries (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    conversation bigint NOT NULL,
    session text COLLATE "C" NOT NULL,
    parent bigint,
    turn bigint NOT NULL,
    kind text NOT NULL,
    model text NOT NULL DEFAULT '',
    body text,
    body_blob text,
    call_entry bigint,
    call_index bigint,
    input_tokens bigint,
    output_tokens bigint,
    cached_tokens bigint,
    reasoning_tokens bigint,
    cache_write_tokens bigint,
    estimated bigint,
    cost float8,
    estimate bigint,
    created_ms bigint NOT NULL,
    CHECK ((body IS NULL) <> (body_blob IS NULL)),
    CHECK (parent < id)
);
CREATE INDEX entries_by_session ON crow.entries (conversation, session, id);
CREATE INDEX entries_results ON crow.entries (call_entry, call_index) WHERE kind = 'tool';

CREATE FUNCTION crow.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'entries never change';
END
$$;
CREATE TRIGGER entries_never_change BEFORE UPDATE ON crow.entries
    FOR EACH ROW EXECUTE FUNCTION crow.refuse_change();

-- The searchable texts of prompts and answers in lower case, and the crc32 of each three characters that follow each
-- other. So no extension is needed, and scripts without spaces are found as well.
CREATE TABLE crow.texts (
    entry bigint PRIMARY KEY,
    folded text NOT NULL,
    trigrams int[] NOT NULL
);
CREATE INDEX texts_by_trigram ON crow.texts USING gin (trigrams);

-- Prompts that wait for their turn; images are inline. `owner` is the store that put it there.
CREATE TABLE crow.inbox (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session text COLLATE "C" NOT NULL,
    owner text NOT NULL,
    message_id text NOT NULL,
    parts text NOT NULL,
    created_ms bigint NOT NULL
);
CREATE INDEX inbox_by_session ON crow.inbox (session);

-- Pieces of the running stream: `piece` is a JSON array of its text and its thought.
CREATE TABLE crow.drafts (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session text COLLATE "C" NOT NULL,
    after_leaf bigint,
    turn bigint NOT NULL,
    message_id text NOT NULL,
    piece text NOT NULL,
    created_ms bigint NOT NULL
);
CREATE INDEX drafts_by_session ON crow.drafts (session);

-- Insert-only: where a session stood before somebody moved it.
CREATE TABLE crow.moves (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session text COLLATE "C" NOT NULL,
    from_leaf bigint,
    to_leaf bigint,
    reason text NOT NULL,
    created_ms bigint NOT NULL
);
CREATE INDEX moves_by_session ON crow.moves (session);

-- `hash` is the sha256 (hex) of `data`.
CREATE TABLE crow.blobs (
    hash text COLLATE "C" PRIMARY KEY,
    size bigint NOT NULL,
    data bytea NOT NULL
);
CREATE TABLE crow.blob_refs (
    blob text COLLATE "C" NOT NULL,
    entry bigint NOT NULL,
    PRIMARY KEY (blob, entry)
);
CREATE INDEX blob_refs_by_entry ON crow.blob_refs (entry);

-- What was learned about an endpoint: a JSON object.
CREATE TABLE crow.endpoints (
    base_url text NOT NULL,
    model text NOT NULL,
    learned text NOT NULL DEFAULT '{}',
    PRIMARY KEY (base_url, model)
);

-- Where imported conversations came from.
CREATE TABLE crow.imports (
    conversation bigint PRIMARY KEY REFERENCES crow.conversations ON DELETE CASCADE,
    hash text NOT NULL,
    created_ms bigint NOT NULL
);
CREATE INDEX imports_by_hash ON crow.imports (hash);

-- Sessions that were empty when they were created or opened, and the stores that opened them.
CREATE TABLE crow.openings (
    session text COLLATE "C" NOT NULL,
    owner text NOT NULL,
    opened_ms bigint NOT NULL,
    PRIMARY KEY (session, owner)
);

-- All times are those of this server, in Unix milliseconds.
CREATE FUNCTION crow.now_ms() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint
$$;

-- Stores that may run turns, and their last sign of life. They give one every few seconds. After a crash of the server
-- no connection is left, so this table may be empty then.
CREATE UNLOGGED TABLE crow.owners (
    owner text COLLATE "C" PRIMARY KEY,
    signed_ms bigint NOT NULL
) WITH (fillfactor = 50);

-- Whether a store is alive: it holds the advisory lock that its token names, and its last sign of life is younger than
-- the lease of 20 s. A store that is frozen or cut off still holds its lock for a while.
CREATE FUNCTION crow.is_alive(store text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    token text := CASE WHEN store LIKE '{%' THEN store::json ->> 'token' END;
BEGIN
    IF token IS NULL OR token !~ '^[0-9a-f]{16}$'
        OR NOT EXISTS (SELECT 1 FROM crow.owners o WHERE o.owner = store AND crow.now_ms() - o.signed_ms < 20000)
    THEN
        RETURN false;
    END IF;
    -- This shared lock ends with the transaction. It cannot be had while the store holds its own.
    RETURN NOT pg_try_advisory_xact_lock_shared(('x' || token)::bit(64)::bigint);
END
$$;

-- Adds without an overflow: the result is at most the largest bigint.
CREATE FUNCTION crow.plus(a bigint, b bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(least(a::numeric + b, 9223372036854775807), -9223372036854775807)::bigint
$$;

-- Inserts a chain of entries below `parent` and returns their ids. `added` is a JSON array of objects with the columns.
-- Blob number n belongs to entry number blob_entries[n] of the chain, from 1. The caller has locked the session, so
-- that its ids ascend in the order in which they are stored.
CREATE FUNCTION crow.add_entries(
    conversation bigint, session text, parent bigint, now_ms bigint, added json,
    blob_hashes text[], blob_datas bytea[], blob_entries int[]
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    ids bigint[] := ARRAY(SELECT nextval('crow.entries_id_seq') FROM generate_series(1, json_array_length(added)));
BEGIN
    WITH item AS MATERIALIZED (
        SELECT * FROM ROWS FROM (json_to_recordset(added) AS (
            turn bigint, kind text, model text, body text, body_blob text, call_entry bigint, call_index bigint,
            input_tokens bigint, output_tokens bigint, cached_tokens bigint, reasoning_tokens bigint,
            cache_write_tokens bigint, estimated bigint, cost float8, estimate bigint, folded text, trigrams text
        )) WITH ORDINALITY AS x (
            turn, kind, model, body, body_blob, call_entry, call_index, input_tokens, output_tokens, cached_tokens,
            reasoning_tokens, cache_write_tokens, estimated, cost, estimate, folded, trigrams, number
        )
    ), stored AS (
        INSERT INTO crow.entries (
            id, conversation, session, parent, turn, kind, model, body, body_blob, call_entry, call_index,
            input_tokens, output_tokens, cached_tokens, reasoning_tokens, cache_write_tokens, estimated, cost, estimate,
            created_ms
        ) OVERRIDING SYSTEM VALUE
        SELECT ids[number], add_entries.conversation, add_entries.session,
            CASE WHEN number = 1 THEN add_entries.parent ELSE ids[number - 1] END, turn, kind, model, body, body_blob,
            call_entry, call_index, input_tokens, output_tokens, cached_tokens, reasoning_tokens, cache_write_tokens,
            estimated, cost, estimate, add_entries.now_ms
        FROM item ORDER BY number
    )
    INSERT INTO crow.texts SELECT ids[number], folded, trigrams::int[] FROM item WHERE folded IS NOT NULL;
    IF cardinality(blob_hashes) > 0 THEN
        INSERT INTO crow.blobs (hash, size, data)
            SELECT hash, length(data), data FROM unnest(blob_hashes, blob_datas) AS b (hash, data) ORDER BY hash
            ON CONFLICT DO NOTHING;
        -- A removal may have deleted a blob that was there a moment ago; its row is locked until this transaction ends.
        PERFORM 1 FROM crow.blobs WHERE hash = ANY (blob_hashes) ORDER BY hash FOR KEY SHARE;
        INSERT INTO crow.blob_refs
            SELECT hash, ids[number] FROM unnest(blob_hashes, blob_entries) AS b (hash, number)
            ON CONFLICT DO NOTHING;
    END IF;
    RETURN ids;
END
$$;

-- Moves a session to the end of a chain that was just added, and counts the chain: in its row, and as usage of the
-- session that started it. `counts` are the numbers of entries, input, output and cached tokens, changed files, added
-- and removed lines.
CREATE FUNCTION crow.move_to_end(
    s crow.sessions, ids bigint[], at_ms bigint, counts bigint[], price float8, prompted boolean, release boolean
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    last_id bigint := ids[cardinality(ids)];
BEGIN
    UPDATE crow.sessions u SET
        leaf = coalesce(last_id, u.leaf), newest_entry = coalesce(last_id, u.newest_entry), updated_ms = at_ms,
        state = CASE WHEN release THEN 'idle' ELSE u.state END,
        owner = CASE WHEN release THEN '' ELSE u.owner END,
        entries = u.entries + counts[1], cost = u.cost + price,
        tokens_in = crow.plus(u.tokens_in, counts[2]), tokens_out = crow.plus(u.tokens_out, counts[3]),
        tokens_cached = crow.plus(u.tokens_cached, counts[4]),
        files_changed = u.files_changed + counts[5], lines_added = u.lines_added + counts[6],
        lines_removed = u.lines_removed + counts[7], has_prompt = u.has_prompt OR prompted
    WHERE u.number = s.number;
    IF s.parent_id IS NOT NULL AND (price <> 0 OR counts[2] <> 0 OR counts[3] <> 0 OR counts[4] <> 0) THEN
        UPDATE crow.sessions u SET cost = u.cost + price,
            tokens_in = crow.plus(u.tokens_in, counts[2]), tokens_out = crow.plus(u.tokens_out, counts[3]),
            tokens_cached = crow.plus(u.tokens_cached, counts[4])
        WHERE u.id = s.parent_id;
    END IF;
END
$$;

-- Appends a chain of entries below `expected`, in one statement. `outcome` is ok, gone, busy (a living store runs a
-- turn), interrupted (a dead one left a turn), fenced (`held_epoch` is not the session's any more) or moved (the leaf is
-- not `expected`). Unless it is ok, nothing was written.
CREATE FUNCTION crow.append(
    session text, writer text, held_epoch bigint, expected bigint, added json, counts bigint[], price float8,
    prompted boolean, release boolean, ends_draft boolean, prompts text[], blob_hashes text[], blob_datas bytea[], blob_entries int[],
    OUT outcome text, OUT was_leaf bigint, OUT was_owner text, OUT in_conversation bigint, OUT at_ms bigint,
    OUT ids bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    s crow.sessions;
BEGIN
    SELECT * INTO s FROM crow.sessions WHERE id = session AND deleted_ms IS NULL FOR UPDATE;
    at_ms := crow.now_ms();
    was_leaf := s.leaf;
    was_owner := s.owner;
    in_conversation := s.conversation;
    outcome := CASE
        WHEN s.id IS NULL THEN 'gone'
        WHEN s.state = 'running' AND s.owner <> writer THEN
            CASE WHEN crow.is_alive(s.owner) THEN 'busy' ELSE 'interrupted' END
        WHEN held_epoch IS NOT NULL AND s.epoch <> held_epoch THEN 'fenced'
        WHEN s.leaf IS DISTINCT FROM expected THEN 'moved'
        ELSE 'ok'
    END;
    IF outcome <> 'ok' THEN
        RETURN;
    END IF;
    ids := crow.add_entries(
        s.conversation, session, s.leaf, at_ms, added, blob_hashes, blob_datas, blob_entries
    );
    IF cardinality(prompts) > 0 THEN
        DELETE FROM crow.inbox i WHERE i.session = append.session AND i.message_id = ANY (prompts);
    END IF;
    IF ends_draft THEN
        DELETE FROM crow.drafts d WHERE d.session = append.session;
    ELSIF cardinality(ids) > 0 THEN -- the answer is still streaming: its draft now follows these entries
        UPDATE crow.drafts d SET after_leaf = ids[cardinality(ids)]
            WHERE d.session = append.session AND d.after_leaf IS NOT DISTINCT FROM expected;
    END IF;
    PERFORM crow.move_to_end(s, ids, at_ms, counts, price, prompted, release);
END
$$;
