-- A database as the version before wrote it (schema version 1): pending, delivered and parked rows, start marks,
-- decisions, an approval. Made by that version itself, then dumped by sqlite3.Connection.iterdump.
BEGIN TRANSACTION;
CREATE TABLE approvals (
  event_id TEXT NOT NULL,
  event_digest TEXT NOT NULL,
  state TEXT NOT NULL
    CHECK (state IN ('draining', 'wanted', 'posted', 'dry_run', 'command_failed', 'withdrawn', 'over')),
  changed_at REAL NOT NULL,
  body TEXT NOT NULL,               -- the rest, as JSON
  PRIMARY KEY (event_id, event_digest)
) WITHOUT ROWID;
INSERT INTO "approvals" VALUES('E-3','d-3','posted',1795172407.0,'{"event_id":"E-3","event_digest":"d-3","state":"posted","source":"rule:freeze","decision_id":null,"approvers":[],"reason":null,"arrivals":[],"oldest_issued_at":null,"attempts":1,"http_status":200,"is_told":false,"changed_at":1795172407.0,"posted_at":null,"event":{"event_id":"E-3","event_type":"Reboot","event_status":"Scheduled","resource_type":null,"resources":null,"not_before":null,"not_before_raw":null,"description":null,"event_source":null,"duration_seconds":null,"extra":{}}}');
CREATE TABLE begun (sink TEXT NOT NULL, event_key TEXT NOT NULL, PRIMARY KEY (sink, event_key)) WITHOUT ROWID;
INSERT INTO "begun" VALUES('a','E-1');
INSERT INTO "begun" VALUES('b','E-2');
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
INSERT INTO "decisions" VALUES(1,'portal','anne','k-1','ab','D-1','D-1','E-1','d-1','approve',1795172405000000,1795176000.0,'because',1795172406.0,'new',NULL,NULL);
INSERT INTO "decisions" VALUES(2,'portal','anne','k-1','ab','D-2','D-2','E-1','d-1','hold',1795172405000000,1795176000.0,'because',1795172406.0,'new',NULL,NULL);
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
INSERT INTO "deliveries" VALUES('a',1,'delivered','E-1',0,NULL,1795172400.0,1,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('a',2,'delivered','E-2',1,NULL,1795172400.0,1,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('a',3,'parked','E-3',0,NULL,1795172400.0,1,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('a',4,'pending','E-1',0,NULL,1795172400.0,0,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('a',5,'pending','586ff247-cdcb-53e5-b7e1-d67b042badc8',0,NULL,1795172400.0,0,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('b',1,'pending','E-1',0,NULL,1795172400.0,1,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('b',2,'pending','E-2',1,NULL,1795172400.0,0,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('b',3,'pending','E-3',0,NULL,1795172400.0,0,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('b',4,'pending','E-1',0,NULL,1795172400.0,0,NULL,1795172400.0);
INSERT INTO "deliveries" VALUES('b',5,'pending','586ff247-cdcb-53e5-b7e1-d67b042badc8',0,NULL,1795172400.0,0,NULL,1795172400.0);
CREATE TABLE held (event_key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('boot_id','boot-1');
INSERT INTO "meta" VALUES('created_at','2026-11-20T11:00:00.000Z');
INSERT INTO "meta" VALUES('document','{"incarnation":2,"events":[{"event_id":"E-1","event_type":"Reboot","event_status":"Started","resource_type":null,"resources":["vm_0"],"not_before":null,"not_before_raw":null,"description":null,"event_source":null,"duration_seconds":null,"extra":{}}]}');
INSERT INTO "meta" VALUES('last_good_at','2026-11-20T11:00:00.000Z');
INSERT INTO "meta" VALUES('next_sequence','6');
INSERT INTO "meta" VALUES('stream_id','c38e4c97-404b-4008-90fd-cb474dd0541b');
INSERT INTO "meta" VALUES('vm','{"name":"vm_0","vm_id":"11111111-2222-3333-4444-555555555555","resource_id":null,"subscription_id":null,"resource_group":null,"location":"westeurope","scale_set":null,"zone":null,"placement_group_id":null,"tags":{}}');
CREATE TABLE records (
  sequence INTEGER PRIMARY KEY,
  id TEXT NOT NULL UNIQUE,
  first_id TEXT NOT NULL,           -- the id without its repeat
  event_key TEXT NOT NULL,
  observed_at REAL NOT NULL,        -- seconds since 1970
  is_routed INTEGER NOT NULL,       -- 0: its sinks are not chosen yet, the VM's name is awaited
  body TEXT NOT NULL                -- the record as JSON
);
INSERT INTO "records" VALUES(1,'cfd82e9a-5d14-55ed-bd1d-1671d94a7b78','cfd82e9a-5d14-55ed-bd1d-1671d94a7b78','E-1',1795172400.0,1,'{"schema_version":1,"id":"cfd82e9a-5d14-55ed-bd1d-1671d94a7b78","transition_key":"878fef5c15d98cb900e906f661af61f3d64a718d8849e8ae739c0bf093779d98","stream_id":"c38e4c97-404b-4008-90fd-cb474dd0541b","sequence":1,"transition":"scheduled","evidence":"observed","observed_at":"2026-11-20T11:00:00.000Z","incarnation":1,"previous_incarnation":null,"event":{"event_id":"E-1","event_type":"Reboot","event_status":"Scheduled","resource_type":null,"resources":["vm_0"],"not_before":null,"not_before_raw":null,"description":null,"event_source":null,"duration_seconds":null,"extra":{}},"previous":null,"changed":[],"notice_seconds":null,"affects_this_vm":true,"vm":{"name":"vm_0","vm_id":"11111111-2222-3333-4444-555555555555","resource_id":null,"subscription_id":null,"resource_group":null,"location":"westeurope","scale_set":null,"zone":null,"placement_group_id":null,"tags":{}},"labels":{},"approval":null}');
INSERT INTO "records" VALUES(2,'79a5265a-0069-5169-9b52-73bf6a1345b4','79a5265a-0069-5169-9b52-73bf6a1345b4','E-2',1795172400.0,1,'{"schema_version":1,"id":"79a5265a-0069-5169-9b52-73bf6a1345b4","transition_key":"0ba15d0ad3afc151ed75576ad1a838c830722578bb6c05fa5f104e4d7751d9dc","stream_id":"c38e4c97-404b-4008-90fd-cb474dd0541b","sequence":2,"transition":"scheduled","evidence":"observed","observed_at":"2026-11-20T11:00:00.000Z","incarnation":1,"previous_incarnation":null,"event":{"event_id":"E-2","event_type":"Preempt","event_status":"Scheduled","resource_type":null,"resources":null,"not_before":null,"not_before_raw":null,"description":null,"event_source":null,"duration_seconds":null,"extra":{}},"previous":null,"changed":[],"notice_seconds":null,"affects_this_vm":null,"vm":{"name":"vm_0","vm_id":"11111111-2222-3333-4444-555555555555","resource_id":null,"subscription_id":null,"resource_group":null,"location":"westeurope","scale_set":null,"zone":null,"placement_group_id":null,"tags":{}},"labels":{},"approval":null}');
INSERT INTO "records" VALUES(3,'99b2096f-9a1c-5bea-8d59-355b2ac1b4c1','99b2096f-9a1c-5bea-8d59-355b2ac1b4c1','E-3',1795172400.0,1,'{"schema_version":1,"id":"99b2096f-9a1c-5bea-8d59-355b2ac1b4c1","transition_key":"1a0dd3c01fb5c512717d920a60c7a56ebcc9b25b0f5632aac6e837343f840f98","stream_id":"c38e4c97-404b-4008-90fd-cb474dd0541b","sequence":3,"transition":"scheduled","evidence":"observed","observed_at":"2026-11-20T11:00:00.000Z","incarnation":1,"previous_incarnation":null,"event":{"event_id":"E-3","event_type":"Reboot","event_status":"Scheduled","resource_type":null,"resources":null,"not_before":null,"not_before_raw":null,"description":null,"event_source":null,"duration_seconds":null,"extra":{}},"previous":null,"changed":[],"notice_seconds":null,"affects_this_vm":null,"vm":{"name":"vm_0","vm_id":"11111111-2222-3333-4444-555555555555","resource_id":null,"subscription_id":null,"resource_group":null,"location":"westeurope","scale_set":null,"zone":null,"placement_group_id":null,"tags":{}},"labels":{},"approval":null}');
INSERT INTO "records" VALUES(4,'f87d5e30-4ea0-59a8-976d-00992af3c261','f87d5e30-4ea0-59a8-976d-00992af3c261','E-1',1795172400.0,1,'{"schema_version":1,"id":"f87d5e30-4ea0-59a8-976d-00992af3c261","transition_key":"127ab725f615b1fdef07cc9268f2b6b728f28444096b3130e2ff6e54d376c9af","stream_id":"c38e4c97-404b-4008-90fd-cb474dd0541b","sequence":4,"transition":"started","evidence":"observed","observed_at":"2026-11-20T11:00:00.000Z","incarnation":2,"previous_incarnation":null,"event":{"event_id":"E-1","event_type":"Reboot","event_status":"Started","resource_type":null,"resources":["vm_0"],"not_before":null,"not_before_raw":null,"description":null,"event_source":null,"duration_seconds":null,"extra":{}},"previous":null,"changed":[],"notice_seconds":null,"affects_this_vm":true,"vm":{"name":"vm_0","vm_id":"11111111-2222-3333-4444-555555555555","resource_id":null,"subscription_id":null,"resource_group":null,"location":"westeurope","scale_set":null,"zone":null,"placement_group_id":null,"tags":{}},"labels":{},"approval":null}');
INSERT INTO "records" VALUES(5,'586ff247-cdcb-53e5-b7e1-d67b042badc8','586ff247-cdcb-53e5-b7e1-d67b042badc8','586ff247-cdcb-53e5-b7e1-d67b042badc8',1795172400.0,1,'{"schema_version":1,"id":"586ff247-cdcb-53e5-b7e1-d67b042badc8","transition_key":"1555f514840383d52d00a313ae95fabe9848ce49468d3480c09b8dff320560bf","stream_id":"c38e4c97-404b-4008-90fd-cb474dd0541b","sequence":5,"transition":"heartbeat","evidence":"observed","observed_at":"2026-11-20T11:00:00.000Z","incarnation":2,"previous_incarnation":2,"event":null,"previous":null,"changed":[],"notice_seconds":null,"affects_this_vm":null,"vm":{"name":"vm_0","vm_id":"11111111-2222-3333-4444-555555555555","resource_id":null,"subscription_id":null,"resource_group":null,"location":"westeurope","scale_set":null,"zone":null,"placement_group_id":null,"tags":{}},"labels":{},"approval":null}');
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
INSERT INTO "sinks" VALUES('a',5,2,2,1,0,0,0,0);
INSERT INTO "sinks" VALUES('b',5,0,5,0,0,0,0,0);
CREATE INDEX records_by_first_id ON records (first_id);
CREATE INDEX records_by_event ON records (event_key, sequence);
CREATE INDEX records_unrouted ON records (sequence) WHERE is_routed = 0;
CREATE INDEX records_by_age ON records (observed_at);
CREATE INDEX deliveries_due ON deliveries (sink, urgent DESC, sequence, event_key, attempts, not_before, state)
  WHERE state = 'pending';
CREATE INDEX deliveries_notice ON deliveries (sink, not_before) WHERE state = 'pending' AND not_before IS NOT NULL;
CREATE INDEX deliveries_age ON deliveries (sink, aged_from) WHERE state = 'pending';
CREATE INDEX deliveries_pending_event ON deliveries (event_key, sequence) WHERE state = 'pending';
CREATE INDEX deliveries_parked ON deliveries (sequence) WHERE state = 'parked';
CREATE INDEX deliveries_by_record ON deliveries (sequence, state);
CREATE INDEX decisions_open ON decisions (state, event_id);
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
COMMIT;
PRAGMA user_version = 1;
