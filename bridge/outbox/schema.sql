-- The tables of the outbox, schema version 1. Their text stays as it is: SQLite stores it in every file.
--
-- meta        the last document, the identity, the stream: one value a key
-- records     every transition record once, in the order of the stream
-- deliveries  one row per (record, sink that wants it); a sink has still to get those that are pending
-- sinks       a sink's totals; the triggers below keep them, so that
--             accepted = delivered + pending + parked + evicted + discarded + expired
--             holds after every commit, whoever made it
-- begun       start marks: events that a sink which skips what is over may have heard of
-- decisions   what people decided about events, each jti long after it expired; no bound of the outbox takes them away
-- approvals   by event and content: an approval on its way to Azure, and what became of it
-- held        only in memory: events of which something waits on a disk that refuses writes

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE records (
  sequence INTEGER PRIMARY KEY,
  id TEXT NOT NULL UNIQUE,
  first_id TEXT NOT NULL,           -- the id without its repeat
  event_key TEXT NOT NULL,
  observed_at REAL NOT NULL,        -- seconds since 1970
  is_routed INTEGER NOT NULL,       -- 0: its sinks are not chosen yet, the VM's name is awaited
  body TEXT NOT NULL                -- the record as JSON
);
CREATE INDEX records_by_first_id ON records (first_id);
CREATE INDEX records_by_event ON records (event_key, sequence);
CREATE INDEX records_unrouted ON records (sequence) WHERE is_routed = 0;
CREATE INDEX records_by_age ON records (observed_at);

CREATE TABLE deliveries (
  sink TEXT NOT NULL,
  sequence INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('pending', 'delivered', 'parked', 'expired', 'evicted', 'discarded')),
  event_key TEXT NOT NULL,
  urgent INTEGER NOT NULL,
  not_before REAL,
  aged_from REAL NOT NULL,          -- observed_at, or when a person had it tried again
  attempts INTEGER NOT NULL DEFAULT 0,
  error TEXT,
  changed_at REAL NOT NULL,
  PRIMARY KEY (sink, sequence)
) WITHOUT ROWID;
-- With all that `due` reads, state included, or SQLite looks into the table for each row.
CREATE INDEX deliveries_due ON deliveries (sink, urgent DESC, sequence, event_key, attempts, not_before, state)
  WHERE state = 'pending';
CREATE INDEX deliveries_notice ON deliveries (sink, not_before) WHERE state = 'pending' AND not_before IS NOT NULL;
CREATE INDEX deliveries_age ON deliveries (sink, aged_from) WHERE state = 'pending';
CREATE INDEX deliveries_pending_event ON deliveries (event_key, sequence) WHERE state = 'pending';
CREATE INDEX deliveries_parked ON deliveries (sequence) WHERE state = 'parked';
CREATE INDEX deliveries_by_record ON deliveries (sequence, state);

CREATE TABLE sinks (
  name TEXT PRIMARY KEY,
  accepted INTEGER NOT NULL DEFAULT 0,
  delivered INTEGER NOT NULL DEFAULT 0,
  pending INTEGER NOT NULL DEFAULT 0,
  parked INTEGER NOT NULL DEFAULT 0,
  expired INTEGER NOT NULL DEFAULT 0,
  evicted INTEGER NOT NULL DEFAULT 0,
  discarded INTEGER NOT NULL DEFAULT 0,
  nudges INTEGER NOT NULL DEFAULT 0  -- counts `outbox retry`; the agent looks at once when it moved
) WITHOUT ROWID;

CREATE TABLE decisions (
  arrival INTEGER PRIMARY KEY,
  source TEXT NOT NULL,             -- portal or cli
  approver TEXT NOT NULL,
  kid TEXT,
  key_sha256 TEXT,
  jti TEXT NOT NULL,
  payload_sha256 TEXT NOT NULL,
  event_id TEXT NOT NULL,
  event_digest TEXT NOT NULL,
  verdict TEXT NOT NULL CHECK (verdict IN ('approve', 'hold')),
  issued_at INTEGER NOT NULL,       -- microseconds since 1970: the newest wins, so nothing is rounded
  expires_at REAL NOT NULL,         -- seconds since 1970
  reason TEXT,
  received_at REAL NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('new', 'waiting', 'held', 'followed', 'refused')),
  outcome TEXT,                     -- the result that a record would name
  said TEXT,                        -- a sentence for whoever asked
  UNIQUE (source, approver, jti)
);
CREATE INDEX decisions_open ON decisions (state, event_id);

CREATE TABLE approvals (
  event_id TEXT NOT NULL,
  event_digest TEXT NOT NULL,
  state TEXT NOT NULL
    CHECK (state IN ('draining', 'wanted', 'posted', 'dry_run', 'command_failed', 'withdrawn', 'over')),
  changed_at REAL NOT NULL,
  body TEXT NOT NULL,               -- the rest, as JSON
  PRIMARY KEY (event_id, event_digest)
) WITHOUT ROWID;

CREATE TABLE held (event_key TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE begun (sink TEXT NOT NULL, event_key TEXT NOT NULL, PRIMARY KEY (sink, event_key)) WITHOUT ROWID;

CREATE TRIGGER deliveries_accepted AFTER INSERT ON deliveries BEGIN
  INSERT OR IGNORE INTO sinks (name) VALUES (new.sink);
  UPDATE sinks SET
    accepted = accepted + 1,
    pending = pending + (new.state = 'pending'), parked = parked + (new.state = 'parked'),
    delivered = delivered + (new.state = 'delivered'), expired = expired + (new.state = 'expired'),
    evicted = evicted + (new.state = 'evicted'), discarded = discarded + (new.state = 'discarded')
  WHERE name = new.sink;
END;

CREATE TRIGGER deliveries_moved AFTER UPDATE OF state ON deliveries WHEN new.state <> old.state BEGIN
  UPDATE sinks SET
    pending = pending + (new.state = 'pending') - (old.state = 'pending'),
    parked = parked + (new.state = 'parked') - (old.state = 'parked'),
    delivered = delivered + (new.state = 'delivered') - (old.state = 'delivered'),
    expired = expired + (new.state = 'expired') - (old.state = 'expired'),
    evicted = evicted + (new.state = 'evicted') - (old.state = 'evicted'),
    discarded = discarded + (new.state = 'discarded') - (old.state = 'discarded')
  WHERE name = new.sink;
END;

CREATE TRIGGER deliveries_owed BEFORE DELETE ON deliveries WHEN old.state IN ('pending', 'parked') BEGIN
  SELECT RAISE(ABORT, 'a record that is still owed cannot be deleted');
END;

PRAGMA user_version = 1;
