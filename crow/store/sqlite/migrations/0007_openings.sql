-- Sessions that were empty when they were created or opened, and the stores that opened them. A session is removed if it
-- is still empty and none of these stores is open any more.
CREATE TABLE openings (
    session TEXT NOT NULL,
    owner TEXT NOT NULL,
    opened_ms INTEGER NOT NULL,
    PRIMARY KEY (session, owner)
) WITHOUT ROWID;
-- An older crow may still run and have an empty session open, so only those that are a week old are removed.
INSERT INTO openings (session, owner, opened_ms)
SELECT id, '', updated_ms FROM sessions
WHERE leaf IS NULL AND has_prompt = 0 AND entries = 0 AND parent_id IS NULL AND deleted_ms IS NULL
    AND updated_ms < (strftime('%s', 'now') - 7 * 86400) * 1000;
