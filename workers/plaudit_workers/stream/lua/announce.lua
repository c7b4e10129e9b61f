#!lua flags=allow-oom
-- Names the policy that rollouts must hold. By: trainer, after the files are complete.
-- ARGV: '', incarnation, announcement.
-- Checks: no later trainer. Changes: state.announced. Returns: announced | stale.
if stale(ARGV[2]) then return 'stale' end
redis.call('HSET', state, 'announced', ARGV[3])
return 'announced'
