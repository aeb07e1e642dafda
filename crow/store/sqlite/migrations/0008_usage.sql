-- Tokens that were written to the provider's cache; and what crow estimated because the endpoint did not report it: 1 for
-- the input, 2 for the output, 3 for both. NULL in entries that older versions wrote.
ALTER TABLE entries ADD COLUMN cache_write_tokens INTEGER;
ALTER TABLE entries ADD COLUMN estimated INTEGER;

DROP VIEW usage;

-- Sums by session, model and day (UTC). An entry counts once, however many forks share it. The usage of a sub-agent
-- counts for its own session (`sessions.parent_id` names the session that started it). Input includes the tokens that
-- were read from the provider's cache and written to it, and output includes reasoning. `estimated_requests` counts the
-- requests whose tokens crow estimated because the endpoint did not report them.
CREATE VIEW usage AS
SELECT session, model, date(created_ms / 1000, 'unixepoch') AS day, count(*) AS requests,
    sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens, sum(cached_tokens) AS cached_tokens,
    sum(reasoning_tokens) AS reasoning_tokens, sum(cost) AS cost,
    session AS session_id,
    sum(cache_write_tokens) AS cache_write_tokens, count(nullif(estimated, 0)) AS estimated_requests
FROM entries
WHERE kind <> 'tool' AND (input_tokens IS NOT NULL OR output_tokens IS NOT NULL OR cost IS NOT NULL)
GROUP BY session, model, day;
