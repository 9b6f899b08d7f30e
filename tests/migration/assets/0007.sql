BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE api_keys (
	id INTEGER NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	key_hash VARCHAR(128) NOT NULL, 
	scopes VARCHAR(200) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	last_used_at DOUBLE, 
	revoked_at DOUBLE, prefix VARCHAR(20) DEFAULT '' NOT NULL, expires_at DOUBLE, job_limit INTEGER, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id), 
	CONSTRAINT uq_api_keys_key_hash UNIQUE (key_hash)
);
INSERT INTO "api_keys" VALUES(1,'ci','c7ee01ec8e5dc1d0a4231bf165ed1dc993f5f60c8ab3ad89a79eb56efa932eae','tune',1.79543868441598272319e+09,NULL,NULL,'gsk_WLQxgQ',2.1116626844159827232e+09,50);
INSERT INTO "api_keys" VALUES(2,'me','a88036507b8a849b38d76df8f25b1cd9fd4b4889b90fd557e4aa714696aca951','admin',1.79543868442000603682e+09,NULL,1.7954386844249949455e+09,'gsk_Grboqf',NULL,NULL);
CREATE TABLE audit (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at DOUBLE NOT NULL, 
	actor VARCHAR(200) NOT NULL, 
	action VARCHAR(40) NOT NULL, 
	subject VARCHAR(300) NOT NULL, 
	detail JSON NOT NULL
, previous VARCHAR(64) DEFAULT '' NOT NULL, hash VARCHAR(64) DEFAULT '' NOT NULL);
INSERT INTO "audit" VALUES(1,1.79543868434400558467e+09,'local','promoted','256×4096×4096 bf16 tn on nvidia-h200-132sm','{"revision":1,"replaced":null,"job":"job-1"}','','01d9bf33b91334695ca37c17c638901b676b0724bfadc403791f15bdc97c4b83');
INSERT INTO "audit" VALUES(2,1.79543868435498929023e+09,'local','promoted','256×4096×4096 bf16 tn on nvidia-h200-132sm','{"revision":2,"replaced":1,"job":"job-1"}','01d9bf33b91334695ca37c17c638901b676b0724bfadc403791f15bdc97c4b83','a7b1b76139ed211d0c1c282766a8bb6f48d710e2643dca8297d13c32d8102cce');
INSERT INTO "audit" VALUES(3,1.79543868436098384864e+09,'local','promoted','2×13×127×1000 fp16 nt on nvidia-h200-132sm','{"revision":1,"replaced":null,"job":"job-1"}','a7b1b76139ed211d0c1c282766a8bb6f48d710e2643dca8297d13c32d8102cce','8ee096d6290a30e0ed84a75c90ade5d9ee55ba85d53965d28bc39eb4f90571de');
INSERT INTO "audit" VALUES(4,1.79543868437100195886e+09,'local','pinned','256×4096×4096 bf16 tn on nvidia-h200-132sm','{"revision":1,"replaced":2}','8ee096d6290a30e0ed84a75c90ade5d9ee55ba85d53965d28bc39eb4f90571de','c6324652839c8b765a346ad531ad6550bb024a9ef10308e7e272cddea69f5602');
INSERT INTO "audit" VALUES(5,1.79543868441698837275e+09,'local','key-created','ci','{"prefix":"gsk_WLQxgQ","scope":"tune"}','c6324652839c8b765a346ad531ad6550bb024a9ef10308e7e272cddea69f5602','2b7784876690e6cb69c6b804e70b617a0701805352414238d51245ac94f375b0');
INSERT INTO "audit" VALUES(6,1.79543868442101192477e+09,'local','key-created','me','{"prefix":"gsk_Grboqf","scope":"admin"}','2b7784876690e6cb69c6b804e70b617a0701805352414238d51245ac94f375b0','9d85d83d11a2deac86c2c610623b61651b1b0a1404ff423cfd72c6058ebe71de');
INSERT INTO "audit" VALUES(7,1.79543868442600059506e+09,'local','key-revoked','me','{"prefix":"gsk_Grboqf"}','9d85d83d11a2deac86c2c610623b61651b1b0a1404ff423cfd72c6058ebe71de','c2e32652df399f7b8d66ee5da9b90caefb810d7a47669e0aaad42e67d34c401d');
CREATE TABLE audit_head (
	id INTEGER NOT NULL, 
	entries BIGINT NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_audit_head PRIMARY KEY (id)
);
INSERT INTO "audit_head" VALUES(1,7,'c2e32652df399f7b8d66ee5da9b90caefb810d7a47669e0aaad42e67d34c401d');
CREATE TABLE devices (
	id INTEGER NOT NULL, 
	slug VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	arch VARCHAR(20) NOT NULL, 
	sm_count INTEGER NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	l2_bytes BIGINT NOT NULL, 
	max_clock_mhz INTEGER NOT NULL, 
	memory_bandwidth BIGINT NOT NULL, 
	CONSTRAINT pk_devices PRIMARY KEY (id), 
	CONSTRAINT uq_devices_slug UNIQUE (slug)
);
INSERT INTO "devices" VALUES(1,'nvidia-h200-132sm','NVIDIA H200','sm90',132,150000000000,62914560,1980,4800000000000);
CREATE TABLE environments (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	description JSON NOT NULL, 
	CONSTRAINT pk_environments PRIMARY KEY (id), 
	CONSTRAINT uq_environments_digest UNIQUE (digest)
);
INSERT INTO "environments" VALUES(1,'e960ee6c5879a2e2','{"gpu_uuid":"GPU-1","driver":"580.1","cuda":"13.0","cutlass":"4.2.0","compiler":"V13.0.88","torch":"2.13.0","cublas":"13.0","gemmsmith":"0.1.0"}');
CREATE TABLE gpus (
	uuid VARCHAR(80) NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	seen_at DOUBLE NOT NULL, 
	CONSTRAINT pk_gpus PRIMARY KEY (uuid), 
	CONSTRAINT fk_gpus_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_gpus_environment_id FOREIGN KEY(environment_id) REFERENCES environments (id)
);
INSERT INTO "gpus" VALUES('GPU-1',1,1,1.79543868442998385431e+09);
CREATE TABLE "idempotency_keys" (
	"key" VARCHAR(255) NOT NULL, 
	job_id INTEGER NOT NULL, 
	created_at DOUBLE NOT NULL, 
	owner VARCHAR(200) DEFAULT ('') NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (owner, "key"), 
	CONSTRAINT fk_idempotency_keys_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "idempotency_keys" VALUES('key-1',1,1.79543868438198566438e+09,'');
INSERT INTO "idempotency_keys" VALUES('key-1',2,1.79543868441199970251e+09,'ci');
CREATE TABLE job_events (
	job_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	kind VARCHAR(40) NOT NULL, 
	data JSON NOT NULL, 
	CONSTRAINT pk_job_events PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_job_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_events" VALUES(1,1,1795438684.38102,'created','{"problem":"256×4096×4096 bf16 tn","effort":"quick","device":""}');
INSERT INTO "job_events" VALUES(1,2,1.79543868439401531214e+09,'started','{"attempt":1,"owner":"worker-1"}');
INSERT INTO "job_events" VALUES(1,3,1.79543868440198159212e+09,'progress','{"phase":"screen","done":3,"total":12,"best_us":11.5,"best":"kernel_1@x","message":""}');
INSERT INTO "job_events" VALUES(1,4,1.79543868440499901776e+09,'finished','{"winner_revision":2,"best_us":11.5,"best":"kernel_1@x"}');
INSERT INTO "job_events" VALUES(2,1,1.79543868441099381452e+09,'created','{"problem":"2×13×127×1000 fp16 nt","effort":"default","device":"nvidia-h200-132sm"}');
CREATE TABLE jobs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	public_id VARCHAR(40) NOT NULL, 
	problem_id INTEGER NOT NULL, 
	effort VARCHAR(20) NOT NULL, 
	device VARCHAR(200) NOT NULL, 
	priority INTEGER NOT NULL, 
	active_key VARCHAR(300), 
	state VARCHAR(20) NOT NULL, 
	phase VARCHAR(40) NOT NULL, 
	done INTEGER NOT NULL, 
	total INTEGER NOT NULL, 
	best_us DOUBLE, 
	best TEXT, 
	error TEXT, 
	winner_revision INTEGER, 
	cancel_requested BOOLEAN NOT NULL, 
	owner VARCHAR(200), 
	attempt INTEGER NOT NULL, 
	handed_back INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	lease_expires_at DOUBLE, 
	available_at DOUBLE NOT NULL, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	last_event INTEGER NOT NULL, calls BIGINT DEFAULT 0 NOT NULL, saving_us DOUBLE DEFAULT 0 NOT NULL, ordered_by VARCHAR(200), deadline_at DOUBLE, 
	CONSTRAINT fk_jobs_problem_id FOREIGN KEY(problem_id) REFERENCES problems (id), 
	CONSTRAINT uq_jobs_active_key UNIQUE (active_key), 
	CONSTRAINT uq_jobs_public_id UNIQUE (public_id)
);
INSERT INTO "jobs" VALUES(1,'1b40c21543d14123a762b2702357c178',1,'quick','',0,NULL,'done','screen',3,12,11.5,'kernel_1@x',NULL,2,0,'worker-1',1,0,3,NULL,1.79543868437800264361e+09,1.79543868437800264361e+09,1.79543868439300966259e+09,1.79543868440499901776e+09,4,0,0.0,NULL,NULL);
INSERT INTO "jobs" VALUES(2,'2a18d2ebe8c44f71a55def398591c0e2',2,'default','nvidia-h200-132sm',3,'2/default/nvidia-h200-132sm','waiting','',0,0,NULL,NULL,NULL,NULL,0,NULL,0,0,3,NULL,1.79543868440998792643e+09,1.79543868440998792643e+09,NULL,NULL,1,96,1.5,'ci',1.17954386844099884032e+10);
CREATE TABLE kernels (
	id INTEGER NOT NULL, 
	name VARCHAR(300) NOT NULL, 
	description JSON NOT NULL, 
	CONSTRAINT pk_kernels PRIMARY KEY (id), 
	CONSTRAINT uq_kernels_name UNIQUE (name)
);
INSERT INTO "kernels" VALUES(1,'kernel_1','{"backend":"cutlass3x","name":"kernel_1","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
INSERT INTO "kernels" VALUES(2,'kernel_2','{"backend":"cutlass3x","name":"kernel_2","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
INSERT INTO "kernels" VALUES(3,'kernel_3','{"backend":"cutlass3x","name":"kernel_3","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
INSERT INTO "kernels" VALUES(4,'kernel_0','{"backend":"cutlass3x","name":"kernel_0","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
CREATE TABLE pack_kernels (
	pack_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	CONSTRAINT pk_pack_kernels PRIMARY KEY (pack_id, position), 
	CONSTRAINT fk_pack_kernels_kernel_id FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	CONSTRAINT fk_pack_kernels_pack_id FOREIGN KEY(pack_id) REFERENCES packs (id) ON DELETE CASCADE
);
INSERT INTO "pack_kernels" VALUES(1,0,1);
CREATE TABLE packs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	hash VARCHAR(128) NOT NULL, 
	toolchain VARCHAR(128) NOT NULL, 
	bytes BIGINT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT uq_packs_hash UNIQUE (hash)
);
INSERT INTO "packs" VALUES(1,'c0ffee','toolchain',123456,1.79543868432698702809e+09);
CREATE TABLE "problems" (
	id INTEGER NOT NULL, 
	dtype VARCHAR(120) NOT NULL, 
	layout VARCHAR(4) NOT NULL, 
	batch INTEGER NOT NULL, 
	m INTEGER NOT NULL, 
	n INTEGER NOT NULL, 
	k INTEGER NOT NULL, 
	lg_m DOUBLE NOT NULL, 
	lg_n DOUBLE NOT NULL, 
	lg_k DOUBLE NOT NULL, 
	operation VARCHAR(120) NOT NULL, 
	CONSTRAINT pk_problems PRIMARY KEY (id), 
	CONSTRAINT uq_problems_identity UNIQUE (operation, batch, m, n, k)
);
INSERT INTO "problems" VALUES(1,'bf16','tn',1,256,4096,4096,8.0,12.0,12.0,'bf16.tn');
INSERT INTO "problems" VALUES(2,'fp16','nt',2,13,127,1000,3.70043971814109218243e+00,6.98868468677216547746e+00,9.96578428466208698921e+00,'fp16.nt');
CREATE TABLE trials (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	created_at DOUBLE NOT NULL, 
	problem_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	launch_key VARCHAR(100) NOT NULL, 
	launch JSON NOT NULL, 
	phase VARCHAR(20) NOT NULL, 
	job VARCHAR(100) NOT NULL, 
	median_us DOUBLE, 
	ci_low_us DOUBLE, 
	ci_high_us DOUBLE, 
	samples INTEGER, 
	samples_us JSON NOT NULL, 
	failure_kind VARCHAR(20), 
	failure_message TEXT, 
	correctness JSON, 
	conditions JSON, 
	workspace_bytes BIGINT NOT NULL, 
	cost_s DOUBLE NOT NULL, 
	replayed BOOLEAN NOT NULL, 
	CONSTRAINT fk_trials_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_trials_environment_id FOREIGN KEY(environment_id) REFERENCES environments (id), 
	CONSTRAINT fk_trials_kernel_id FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	CONSTRAINT fk_trials_problem_id FOREIGN KEY(problem_id) REFERENCES problems (id), 
	CONSTRAINT uq_trials_identity UNIQUE (problem_id, device_id, kernel_id, launch_key, phase, environment_id, job)
);
INSERT INTO "trials" VALUES(1,1.79543868432400965688e+09,1,1,1,1,'along_m.s4.split_k.x2.sm0','{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','screen','job-1',11.0,10.0,12.0,3,'[10.0,11.0,12.0]',NULL,NULL,'{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true}','{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]}',4096,0.25,0);
INSERT INTO "trials" VALUES(2,1.79543868432400965688e+09,2,1,1,2,'along_m.s4.split_k.x2.sm0','{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','screen','',12.0,11.0,13.0,3,'[11.0,12.0,13.0]',NULL,NULL,'{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true}','{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]}',4096,0.25,0);
INSERT INTO "trials" VALUES(3,1.79543868432400965688e+09,1,1,1,3,'along_m.s4.split_k.x2.sm0','{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','screen','',NULL,NULL,NULL,NULL,'[]','non_finite','NaN at D[0, 3]','{"error":"inf","max_error":"inf","tolerance":0.01,"repeatable":false}',NULL,4096,0.25,0);
CREATE TABLE winners (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	problem_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	kernel_id INTEGER, 
	revision INTEGER NOT NULL, 
	sequence BIGINT NOT NULL, 
	is_current BOOLEAN NOT NULL, 
	pinned BOOLEAN NOT NULL, 
	origin VARCHAR(20) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	use VARCHAR(20) NOT NULL, 
	median_us DOUBLE, 
	speedup DOUBLE, 
	launch JSON, 
	record JSON NOT NULL, 
	replayed BOOLEAN NOT NULL, 
	pack VARCHAR(128), 
	promoted_at VARCHAR(40) NOT NULL, 
	job VARCHAR(100), signature JSON, 
	CONSTRAINT fk_winners_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_winners_environment_id FOREIGN KEY(environment_id) REFERENCES environments (id), 
	CONSTRAINT fk_winners_kernel_id FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	CONSTRAINT fk_winners_problem_id FOREIGN KEY(problem_id) REFERENCES problems (id), 
	CONSTRAINT uq_winners_revision UNIQUE (problem_id, device_id, revision)
);
INSERT INTO "winners" VALUES(1,1,1,1,4,1,4,1,1,'measured','1f42484e4bf217facabb2e08a2177ecb','cutlass',12.0,1.0,'{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','{"statistics":{"median_us":12.0,"ci_low_us":12.0,"ci_high_us":12.0,"samples":25},"baseline":{"median_us":12.0,"ci_low_us":11.5,"ci_high_us":12.5,"samples":25},"speedup":{"median":1.0,"ci_low":1.01,"ci_high":1.4},"correctness":{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true},"conditions":{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]},"ties":["kernel_7@heuristic.s1.data_parallel.x1.sm0"],"baseline_kernels":[],"power_penalty":null,"regimes":[],"device":{"name":"NVIDIA H200","arch":"sm90","sm_count":132,"memory_bytes":150000000000,"l2_bytes":62914560,"max_clock_mhz":1980,"memory_bandwidth":4800000000000},"rivals":[],"spreads":[]}',0,NULL,'2026-11-20T10:00:00.000+00:00','job-1',NULL);
INSERT INTO "winners" VALUES(2,1,1,1,4,2,2,0,0,'measured','86109bb5b09707d67291bc1fc4bebd5c','cutlass',11.0,1.09090909090909082834e+00,'{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','{"statistics":{"median_us":11.0,"ci_low_us":11.0,"ci_high_us":11.0,"samples":25},"baseline":{"median_us":12.0,"ci_low_us":11.5,"ci_high_us":12.5,"samples":25},"speedup":{"median":1.0909090909090908,"ci_low":1.01,"ci_high":1.4},"correctness":{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true},"conditions":{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]},"ties":["kernel_7@heuristic.s1.data_parallel.x1.sm0"],"baseline_kernels":[],"power_penalty":null,"regimes":[],"device":{"name":"NVIDIA H200","arch":"sm90","sm_count":132,"memory_bytes":150000000000,"l2_bytes":62914560,"max_clock_mhz":1980,"memory_bandwidth":4800000000000},"rivals":[],"spreads":[]}',0,'c0ffee','2026-11-20T11:00:00.000+00:00','job-1','{"key":"0123456789abcdef","value":"c2lnbmVk","pack":"c0ffee"}');
INSERT INTO "winners" VALUES(3,2,1,1,4,1,3,1,0,'replayed','9fce6b13188bca0b389dedd7dfc260bb','cutlass',9.0,1.33333333333333325931e+00,'{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','{"statistics":{"median_us":9.0,"ci_low_us":9.0,"ci_high_us":9.0,"samples":25},"baseline":{"median_us":12.0,"ci_low_us":11.5,"ci_high_us":12.5,"samples":25},"speedup":{"median":1.3333333333333333,"ci_low":1.01,"ci_high":1.4},"correctness":{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true},"conditions":{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]},"ties":["kernel_7@heuristic.s1.data_parallel.x1.sm0"],"baseline_kernels":[],"power_penalty":null,"regimes":[],"device":{"name":"NVIDIA H200","arch":"sm90","sm_count":132,"memory_bytes":150000000000,"l2_bytes":62914560,"max_clock_mhz":1980,"memory_bandwidth":4800000000000},"rivals":[],"spreads":[]}',1,NULL,'2026-11-20T12:00:00.000+00:00','job-1',NULL);
CREATE TABLE workers (
	owner VARCHAR(200) NOT NULL, 
	devices JSON NOT NULL, 
	seen_at DOUBLE NOT NULL, 
	CONSTRAINT pk_workers PRIMARY KEY (owner)
);
INSERT INTO "workers" VALUES('host:1:0123abcd','["nvidia-h200-132sm"]',1.79543868443300127981e+09);
CREATE INDEX ix_jobs_lease ON jobs (state, priority, id);
CREATE INDEX ix_pack_kernels_kernel_id ON pack_kernels (kernel_id);
CREATE INDEX ix_trials_job ON trials (job, id);
CREATE INDEX ix_winners_device_id ON winners (device_id);
CREATE INDEX ix_winners_sequence ON winners (sequence);
CREATE UNIQUE INDEX uq_winners_current ON winners (problem_id, device_id) WHERE is_current;
CREATE INDEX ix_jobs_ordered_by ON jobs (ordered_by, state);
CREATE INDEX ix_winners_gain ON winners (device_id, speedup) WHERE is_current;
CREATE INDEX ix_problems_near ON problems (operation, batch, lg_m);
CREATE INDEX ix_idempotency_keys_job_id ON idempotency_keys (job_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('trials',3);
INSERT INTO "sqlite_sequence" VALUES('packs',1);
INSERT INTO "sqlite_sequence" VALUES('winners',3);
INSERT INTO "sqlite_sequence" VALUES('audit',7);
INSERT INTO "sqlite_sequence" VALUES('jobs',2);
COMMIT;
