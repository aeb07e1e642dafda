-- Prompts to which a client has given a name, its id for the prompt. `digest` is the sha256 (hex) of the prompt as it was
-- sent. `turn` is the turn that ran the prompt, and no entry of this turn is older than `entry`. Both are NULL while the
-- prompt is in the inbox, and if it was cancelled there.
CREATE TABLE prompts (
    session TEXT NOT NULL,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    message_id TEXT NOT NULL,
    turn INTEGER,
    entry INTEGER,
    PRIMARY KEY (session, name)
);
CREATE INDEX prompts_waiting ON prompts (session, message_id) WHERE turn IS NULL;
