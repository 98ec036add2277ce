-- Every statement over the tables of schema.sql, by name.

-- name: get_meta
SELECT key, value FROM meta;

-- name: document_bytes
SELECT SUM(LENGTH(value)) FROM meta WHERE key = 'document';

-- name: get_one_meta
SELECT value FROM meta WHERE key = ?;

-- name: put_meta
INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: paste_meta
INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: repeats
SELECT COUNT(*) FROM records WHERE first_id = ? AND sequence <> ?;

-- name: has_id
SELECT 1 FROM records WHERE id = ? AND sequence <> ?;

-- name: add_record
INSERT INTO records (sequence, id, first_id, event_key, observed_at, is_routed, body) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: unrouted
SELECT sequence, body FROM records INDEXED BY records_unrouted WHERE is_routed = 0 ORDER BY sequence;

-- name: route_record
UPDATE records SET id = ?, first_id = ?, is_routed = 1, body = ? WHERE sequence = ?;

-- name: add_delivery
INSERT OR IGNORE INTO deliveries (sink, sequence, state, event_key, urgent, not_before, aged_from, changed_at)
VALUES (?, ?, 'pending', ?, ?, ?, ?, ?);

-- name: make_event_urgent
UPDATE deliveries INDEXED BY deliveries_pending_event SET urgent = 1
WHERE event_key = ? AND state = 'pending' AND urgent = 0;

-- name: due
SELECT sequence, event_key, attempts, not_before, urgent FROM deliveries INDEXED BY deliveries_due
WHERE sink = ? AND state = 'pending' AND sequence > ? AND event_key NOT IN (SELECT event_key FROM held)
ORDER BY urgent DESC, sequence;

-- name: due_of_event
SELECT sequence, deliveries.event_key, attempts, not_before, urgent, CASE WHEN json_valid(body) THEN body END
FROM deliveries INDEXED BY deliveries_pending_event LEFT JOIN records USING (sequence)
WHERE deliveries.event_key = ? AND sink = ? AND state = 'pending' ORDER BY sequence;

-- name: body
-- Null for what is no JSON any more: then the file is damaged.
SELECT CASE WHEN json_valid(body) THEN body END FROM records WHERE sequence = ?;

-- name: soonest_notice
SELECT MIN(not_before) FROM deliveries INDEXED BY deliveries_notice
WHERE sink = ? AND state = 'pending' AND not_before > ?;

-- name: soonest_notice_of_event
SELECT MIN(not_before) FROM deliveries INDEXED BY deliveries_pending_event
WHERE event_key = ? AND sink = ? AND state = 'pending' AND not_before > ?;

-- name: has_urgent
SELECT urgent FROM deliveries INDEXED BY deliveries_due WHERE sink = ? AND state = 'pending'
ORDER BY urgent DESC, sequence LIMIT 1;

-- name: oldest_pending
SELECT MIN(aged_from) FROM deliveries INDEXED BY deliveries_age WHERE sink = ? AND state = 'pending';

-- name: expire
UPDATE deliveries INDEXED BY deliveries_age SET state = 'expired', changed_at = ?
WHERE sink = ? AND state = 'pending' AND aged_from < ?;

-- name: shift_ages
UPDATE deliveries SET aged_from = aged_from + ? WHERE state = 'pending';

-- name: finish
UPDATE deliveries SET state = ?, error = ?, attempts = attempts + ?, changed_at = ?
WHERE sink = ? AND sequence IN (SELECT value FROM json_each(?)) AND state = 'pending';

-- name: told_of_event
SELECT records.sequence, deliveries.changed_at, body
FROM records INDEXED BY records_by_event CROSS JOIN deliveries
  ON deliveries.sink = ? AND deliveries.sequence = records.sequence
WHERE records.event_key = ? AND deliveries.state = 'delivered' AND json_valid(body)
ORDER BY records.sequence DESC;

-- name: newest_of_life
SELECT sequence, CASE WHEN json_valid(body) THEN json_extract(body, '$.transition') END AS transition, body
FROM records INDEXED BY records_by_event
WHERE event_key = ? AND transition IN ('scheduled', 'started', 'updated', 'completed', 'canceled', 'ended')
ORDER BY sequence DESC LIMIT 1;

-- name: was_told
-- Nothing when no record of the event's life was ever for the sink; 0 when the last one that was is its end. What became
-- of an approval does not count: with speak = "first" it is told by a VM that does not tell of the event.
SELECT COALESCE(CASE WHEN json_valid(body) THEN json_extract(body, '$.transition') END, '')
  NOT IN ('completed', 'canceled', 'ended')
FROM records INDEXED BY records_by_event CROSS JOIN deliveries
  ON deliveries.sink = ? AND deliveries.sequence = records.sequence
WHERE records.event_key = ? AND records.sequence < ?
  AND CASE WHEN json_valid(body) THEN json_extract(body, '$.approval') END IS NULL
ORDER BY records.sequence DESC LIMIT 1;

-- name: has_newer
SELECT 1 FROM deliveries INDEXED BY deliveries_pending_event
WHERE event_key = :event_key AND sink = :sink AND state = 'pending'
UNION ALL
SELECT 1 FROM held WHERE event_key = :event_key
LIMIT 1;

-- name: last_told_sequences
SELECT deliveries.sink, MAX(records.sequence)
FROM records INDEXED BY records_by_event CROSS JOIN deliveries USING (sequence)
WHERE records.event_key = ? AND deliveries.state = 'delivered'
  AND CASE WHEN json_valid(body) THEN json_extract(body, '$.transition') END IN ('scheduled', 'started', 'updated')
GROUP BY deliveries.sink;

-- name: note_failure
UPDATE deliveries SET attempts = attempts + 1, error = ?, changed_at = ?
WHERE sink = ? AND sequence = ? AND state = 'pending';

-- name: known_sinks
SELECT name FROM sinks ORDER BY name;

-- name: add_sink
INSERT OR IGNORE INTO sinks (name) VALUES (?);

-- name: retry_requests
SELECT nudges FROM sinks WHERE name = ?;

-- name: request_retry
UPDATE sinks SET nudges = nudges + 1 WHERE name = ?;

-- name: totals
SELECT name, accepted, delivered, pending, parked, expired, evicted, discarded FROM sinks ORDER BY name;

-- name: set_totals
INSERT INTO sinks (name, accepted, delivered, pending, parked, expired, evicted, discarded, nudges)
VALUES (:name, :accepted, :delivered, :pending, :parked, :expired, :evicted, :discarded, :nudges)
ON CONFLICT (name) DO UPDATE SET accepted = excluded.accepted, delivered = excluded.delivered,
  pending = excluded.pending, parked = excluded.parked, expired = excluded.expired,
  evicted = excluded.evicted, discarded = excluded.discarded, nudges = excluded.nudges;

-- name: count_unfinished
SELECT sink, SUM(state = 'pending'), SUM(state = 'parked') FROM deliveries GROUP BY sink;

-- name: count_rows
SELECT sink, state, COUNT(*) FROM deliveries GROUP BY sink, state;

-- name: last_of_event
SELECT body FROM records INDEXED BY records_by_event WHERE event_key = ? AND body <> '' AND is_routed = 1
ORDER BY sequence DESC LIMIT 1;

-- name: last_sequence_of_event
SELECT MAX(sequence) FROM records INDEXED BY records_by_event WHERE event_key = ?;

-- name: is_unfinished
SELECT 1 FROM deliveries INDEXED BY deliveries_by_record WHERE sequence = ? AND state IN ('pending', 'parked') LIMIT 1;

-- name: finished_before
SELECT sequence FROM records INDEXED BY records_by_age WHERE observed_at < ? AND is_routed = 1
  AND NOT EXISTS (SELECT 1 FROM deliveries INDEXED BY deliveries_by_record
                  WHERE deliveries.sequence = records.sequence AND state IN ('pending', 'parked'))
ORDER BY observed_at LIMIT ?;

-- name: oldest_finished
SELECT sequence FROM records WHERE sequence > ? AND is_routed = 1
  AND NOT EXISTS (SELECT 1 FROM deliveries INDEXED BY deliveries_by_record
                  WHERE deliveries.sequence = records.sequence AND state IN ('pending', 'parked'))
ORDER BY sequence LIMIT ?;

-- name: newest_finished
SELECT sequence FROM records WHERE is_routed = 1
  AND NOT EXISTS (SELECT 1 FROM deliveries INDEXED BY deliveries_by_record
                  WHERE deliveries.sequence = records.sequence AND state IN ('pending', 'parked'))
ORDER BY sequence DESC LIMIT 1 OFFSET ?;

-- name: oldest_parked
SELECT sequence FROM deliveries INDEXED BY deliveries_parked WHERE state = 'parked' AND sequence > ?
ORDER BY sequence LIMIT ?;

-- name: oldest_unfinished
SELECT sequence FROM records WHERE sequence > ? ORDER BY sequence LIMIT ?;

-- name: evict_parked
UPDATE deliveries SET state = 'evicted', changed_at = ? WHERE sequence = ? AND state = 'parked';

-- name: evict_unfinished
UPDATE deliveries SET state = 'evicted', changed_at = ? WHERE sequence = ? AND state IN ('pending', 'parked');

-- name: delete_deliveries
DELETE FROM deliveries WHERE sequence = ?;

-- name: delete_record
DELETE FROM records WHERE sequence = ?;

-- name: list_last_records
SELECT body FROM records WHERE sequence > ? AND body <> '' ORDER BY sequence DESC LIMIT ?;

-- name: list_deliveries
SELECT deliveries.sink, deliveries.sequence, deliveries.state, deliveries.attempts, deliveries.error,
  deliveries.changed_at, records.body
FROM deliveries JOIN records USING (sequence)
WHERE (:sink IS NULL OR deliveries.sink = :sink) AND (:state IS NULL OR deliveries.state = :state)
ORDER BY deliveries.sink, deliveries.sequence LIMIT :limit;

-- name: newest_record_at
SELECT MAX(observed_at) FROM records INDEXED BY records_by_age;

-- name: last_records_of_event
SELECT body FROM records INDEXED BY records_by_event WHERE event_key = ? AND body <> '' ORDER BY sequence DESC LIMIT ?;

-- name: last_error
SELECT error, changed_at FROM (
  SELECT error, changed_at FROM deliveries INDEXED BY deliveries_age
  WHERE sink = :sink AND state = 'pending' AND error IS NOT NULL
  UNION ALL
  SELECT error, changed_at FROM deliveries INDEXED BY deliveries_parked
  WHERE state = 'parked' AND sink = :sink AND error IS NOT NULL
) ORDER BY changed_at DESC LIMIT 1;

-- name: retry
UPDATE deliveries INDEXED BY deliveries_parked SET state = 'pending', attempts = 0, aged_from = :now, changed_at = :now
WHERE state = 'parked' AND sink = :sink AND (:id IS NULL
  OR sequence = (SELECT sequence FROM records WHERE id = :id));

-- name: unpark
UPDATE deliveries SET state = 'pending', changed_at = ?
WHERE sink = ? AND state = 'parked' AND sequence IN (SELECT value FROM json_each(?));

-- name: discard
UPDATE deliveries SET state = 'discarded', changed_at = :now
WHERE sink = :sink AND state IN ('pending', 'parked') AND (:state IS NULL OR state = :state)
  AND (:id IS NULL OR sequence = (SELECT sequence FROM records WHERE id = :id));

-- name: copy_records
SELECT sequence, id, first_id, event_key, observed_at, is_routed, body FROM records WHERE body <> '' ORDER BY sequence;

-- name: copy_records_from_the_last
SELECT sequence, id, first_id, event_key, observed_at, is_routed, body FROM records WHERE body <> ''
ORDER BY sequence DESC;

-- name: put_record
INSERT INTO records (sequence, id, first_id, event_key, observed_at, is_routed, body) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (sequence) DO UPDATE SET id = excluded.id, first_id = excluded.first_id, event_key = excluded.event_key,
  observed_at = excluded.observed_at, is_routed = excluded.is_routed, body = excluded.body WHERE records.is_routed = 0;

-- name: copy_last_of_event
SELECT sequence, id, first_id, event_key, observed_at, is_routed, body FROM records INDEXED BY records_by_event
WHERE event_key = ? AND is_routed = 1 ORDER BY sequence DESC LIMIT 1;

-- name: last_record
SELECT MAX(sequence) FROM records;

-- name: last_delivery
SELECT MAX(sequence) FROM deliveries INDEXED BY deliveries_by_record;

-- name: copy_recent_ids
SELECT sequence, id, first_id, event_key, observed_at, 1, '' FROM records ORDER BY sequence DESC LIMIT ?;

-- name: copy_deliveries
SELECT sink, sequence, state, event_key, urgent, not_before, aged_from, attempts, error, changed_at
FROM deliveries ORDER BY sink, sequence;

-- name: copy_deliveries_from_the_last
SELECT sink, sequence, state, event_key, urgent, not_before, aged_from, attempts, error, changed_at
FROM deliveries ORDER BY sink DESC, sequence DESC;

-- name: waiting_events
SELECT event_key FROM deliveries WHERE state = 'pending' UNION SELECT event_key FROM records WHERE is_routed = 0;

-- name: copy_sinks
SELECT name, accepted, delivered, pending, parked, expired, evicted, discarded, nudges FROM sinks ORDER BY name;

-- name: paste_record
INSERT INTO records (sequence, id, first_id, event_key, observed_at, is_routed, body) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- name: paste_delivery
INSERT INTO deliveries
  (sink, sequence, state, event_key, urgent, not_before, aged_from, attempts, error, changed_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (sink, sequence) DO UPDATE SET state = excluded.state, attempts = excluded.attempts,
  error = excluded.error, changed_at = excluded.changed_at
-- What is finished with stays so; of two that are not, the newer counts.
WHERE deliveries.state IN ('pending', 'parked')
  AND (excluded.state NOT IN ('pending', 'parked') OR excluded.changed_at >= deliveries.changed_at)
  AND (deliveries.state, deliveries.attempts, deliveries.changed_at)
    IS NOT (excluded.state, excluded.attempts, excluded.changed_at);

-- name: align_urgency
UPDATE deliveries INDEXED BY deliveries_pending_event SET urgent = 1 WHERE state = 'pending' AND urgent = 0
  AND event_key IN (SELECT event_key FROM deliveries WHERE state = 'pending' AND urgent = 1);

-- name: drop_orphans
DELETE FROM deliveries WHERE state NOT IN ('pending', 'parked')
  AND sequence NOT IN (SELECT sequence FROM records);

-- name: evict_orphans
UPDATE deliveries SET state = 'evicted' WHERE state IN ('pending', 'parked')
  AND sequence NOT IN (SELECT sequence FROM records);

-- name: leave_on_disk
INSERT OR IGNORE INTO held (event_key) VALUES (?);

-- name: count_left_on_disk
SELECT COUNT(*) FROM held;

-- name: add_start_mark
INSERT OR IGNORE INTO begun (sink, event_key) VALUES (?, ?);

-- name: drop_start_mark
DELETE FROM begun WHERE sink = ? AND event_key = ?;

-- name: copy_start_marks
SELECT sink, event_key FROM begun;

-- name: idle_start_marks
SELECT sink, event_key FROM begun WHERE NOT EXISTS (
  SELECT 1 FROM deliveries INDEXED BY deliveries_pending_event
  WHERE deliveries.event_key = begun.event_key AND deliveries.sink = begun.sink AND state = 'pending');

-- name: is_started
SELECT 1 FROM begun WHERE sink = ? AND event_key = ?
UNION ALL
SELECT 1 FROM deliveries WHERE sink = ? AND event_key = ? AND state IN ('delivered', 'parked')
LIMIT 1;

-- name: pending_bodies
SELECT sequence, body FROM deliveries INDEXED BY deliveries_pending_event JOIN records USING (sequence)
WHERE deliveries.event_key = ? AND sink = ? AND state = 'pending' AND body <> '' ORDER BY sequence;

-- name: last_pending_end
SELECT MAX(sequence) FROM deliveries INDEXED BY deliveries_pending_event JOIN records USING (sequence)
WHERE deliveries.event_key = ? AND sink = ? AND state = 'pending'
  AND CASE WHEN json_valid(body) THEN json_extract(body, '$.transition') END IN ('completed', 'canceled', 'ended');

-- name: expire_event
UPDATE deliveries INDEXED BY deliveries_pending_event SET state = 'expired', changed_at = ?
WHERE event_key = ? AND sink = ? AND state = 'pending' AND sequence <= ?;

-- name: find_decision
SELECT payload_sha256 FROM decisions WHERE source = ? AND approver = ? AND jti = ?;

-- name: add_decision
INSERT INTO decisions (source, approver, kid, key_sha256, jti, payload_sha256, event_id, event_digest, verdict,
  issued_at, expires_at, reason, received_at, state)
VALUES (:source, :approver, :kid, :key_sha256, :decision_id, :payload_sha256, :event_id, :event_digest, :verdict,
  :issued_at, :expires_at, :reason, :received_at, 'new');

-- name: date_decision
UPDATE decisions SET issued_at = ? WHERE arrival = ?;

-- name: add_token
-- OR REPLACE: nothing is left of a decision that was deleted, whoever deleted it; this is to be sure.
INSERT OR REPLACE INTO decision_tokens (arrival, token) VALUES (?, ?);

-- name: one_token
SELECT token FROM decision_tokens WHERE arrival = ?;

-- name: open_decisions
SELECT arrival, source, approver, kid, key_sha256, jti, payload_sha256, event_id, event_digest, verdict,
  issued_at, expires_at, reason, received_at, state, outcome, said,
  EXISTS (SELECT 1 FROM records INDEXED BY records_by_event WHERE event_key = decisions.event_id)
FROM decisions INDEXED BY decisions_open WHERE state IN ('new', 'waiting', 'held') ORDER BY arrival;

-- name: one_decision
SELECT arrival, source, approver, kid, key_sha256, jti, payload_sha256, event_id, event_digest, verdict,
  issued_at, expires_at, reason, received_at, state, outcome, said,
  EXISTS (SELECT 1 FROM records INDEXED BY records_by_event WHERE event_key = decisions.event_id)
FROM decisions WHERE source = ? AND jti = ?;

-- name: has_new_hold
SELECT 1 FROM decisions INDEXED BY decisions_open WHERE state = 'new' AND event_id = ? AND verdict = 'hold' LIMIT 1;

-- name: open_decisions_of_key
SELECT arrival, jti, verdict, arrival IN (
  SELECT json_each.value FROM approvals, json_each(approvals.body, '$.arrivals')
  WHERE approvals.event_id = :event_id AND approvals.state IN ('draining', 'wanted'))
FROM decisions INDEXED BY decisions_open
WHERE state IN ('new', 'waiting', 'held') AND event_id = :event_id AND source = :source AND approver = :approver
  AND kid IS :kid
ORDER BY issued_at DESC, verdict = 'hold' DESC, arrival DESC;

-- name: decision_bytes
-- About what the decisions take, with their indexes and with pages that are full in part only.
SELECT COALESCE(SUM(400 + 2 * (LENGTH(event_id) + LENGTH(approver) + LENGTH(jti)) + LENGTH(COALESCE(reason, ''))
  + LENGTH(COALESCE(said, '')) + COALESCE(LENGTH(token), 0) * 5 / 4), 0)
FROM decisions LEFT JOIN decision_tokens USING (arrival);

-- name: droppable_decisions
-- By rank: 0 a hold that is over, of any key. Then of each key: 1 approvals that are over, of events that are not there,
-- 2 open ones of such events, 3 those that are over, of events that are there, 4 holds of events that are not there.
WITH active AS (SELECT value AS event_id FROM json_each(?) WHERE value IS NOT NULL),
  found AS (SELECT *, state IN ('new', 'waiting', 'held') AS is_open, event_id IN active AS is_there FROM decisions)
SELECT arrival, source, approver, kid, jti, event_id, is_open,
  CASE WHEN verdict = 'hold' THEN CASE WHEN is_open THEN 4 ELSE 0 END
    WHEN is_open THEN 2 WHEN is_there THEN 3 ELSE 1 END AS rank,
  400 + 2 * (LENGTH(event_id) + LENGTH(approver) + LENGTH(jti)) + LENGTH(COALESCE(reason, ''))
  + LENGTH(COALESCE(said, '')) + COALESCE(LENGTH(token), 0) * 5 / 4
FROM found LEFT JOIN decision_tokens USING (arrival)
WHERE NOT (is_open AND is_there)
ORDER BY rank, arrival;

-- name: delete_decision
DELETE FROM decisions WHERE arrival = ?;

-- name: update_decision
UPDATE decisions SET state = ?, outcome = ?, said = ? WHERE arrival = ?;

-- name: copy_decisions
SELECT arrival, source, approver, kid, key_sha256, jti, payload_sha256, event_id, event_digest, verdict,
  issued_at, expires_at, reason, received_at, state, outcome, said, 0 FROM decisions NOT INDEXED ORDER BY arrival;

-- name: copy_decisions_from_the_last
SELECT arrival, source, approver, kid, key_sha256, jti, payload_sha256, event_id, event_digest, verdict,
  issued_at, expires_at, reason, received_at, state, outcome, said, 0 FROM decisions NOT INDEXED ORDER BY arrival DESC;

-- name: copy_tokens
SELECT token, arrival FROM decision_tokens ORDER BY arrival;

-- name: copy_approvals
SELECT event_id, event_digest, state, changed_at, body FROM approvals;

-- name: paste_decision
INSERT INTO decisions (arrival, source, approver, kid, key_sha256, jti, payload_sha256, event_id, event_digest, verdict,
  issued_at, expires_at, reason, received_at, state, outcome, said)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- name: paste_token
INSERT INTO decision_tokens (token, arrival)
SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM decisions WHERE arrival = ?2) ON CONFLICT DO NOTHING;

-- name: paste_any_token
INSERT INTO decision_tokens (arrival, token) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: paste_approval
INSERT INTO approvals (event_id, event_digest, state, changed_at, body) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: prune_decisions
DELETE FROM decisions WHERE expires_at < ? AND state NOT IN ('new', 'waiting')
  AND event_id NOT IN (SELECT value FROM json_each(?));

-- name: remembered_approvals
SELECT event_id, event_digest, state, changed_at, body FROM approvals ORDER BY changed_at, event_id;

-- name: open_approvals
SELECT event_id, event_digest, state, changed_at, body FROM approvals WHERE state IN ('draining', 'wanted')
ORDER BY changed_at, event_id;

-- name: put_approval
INSERT INTO approvals (event_id, event_digest, state, changed_at, body) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (event_id, event_digest) DO UPDATE SET state = excluded.state, changed_at = excluded.changed_at,
  body = excluded.body;

-- name: prune_approvals
DELETE FROM approvals WHERE changed_at < ? AND event_id NOT IN (SELECT value FROM json_each(?));

-- name: hold
CREATE TEMP TABLE held (event_key TEXT PRIMARY KEY) WITHOUT ROWID;

-- name: hold_left_on_disk
INSERT OR IGNORE INTO temp.held (event_key) SELECT event_key FROM main.held;

-- name: hold_pending
INSERT OR IGNORE INTO temp.held (event_key) SELECT event_key FROM deliveries WHERE state = 'pending' AND sequence <= ?;

-- name: drop_hold
DROP TABLE IF EXISTS temp.held;

-- name: records_after
SELECT sequence, id, first_id, event_key, observed_at, is_routed, body FROM records
WHERE sequence > ? AND body <> '' ORDER BY sequence;

-- name: deliveries_after
SELECT sink, sequence, state, event_key, urgent, not_before, aged_from, attempts, error, changed_at
FROM deliveries WHERE sequence > ? ORDER BY sink, sequence;

-- name: taken_by
SELECT id, sink FROM records LEFT JOIN deliveries
  ON deliveries.sequence = records.sequence AND deliveries.state = 'delivered';

-- name: told_events
SELECT DISTINCT sink, event_key FROM deliveries WHERE state = 'delivered';

-- name: told_endings
SELECT body FROM records
WHERE json_extract(body, '$.transition') IN ('completed', 'canceled', 'ended')
  AND EXISTS (SELECT 1 FROM deliveries WHERE deliveries.sequence = records.sequence AND state = 'delivered')
ORDER BY sequence;

-- name: sequence_of
SELECT sequence FROM records WHERE id = ?;
