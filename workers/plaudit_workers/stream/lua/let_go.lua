#!lua flags=allow-oom
-- Removes the kept groups of a file that was written. By: reward worker.
-- ARGV: '', number of the file. Returns: how many; for a repeat none.
local batch = prefix .. 'kept_batch'
local groups = redis.call('ZRANGEBYSCORE', batch, ARGV[2], ARGV[2])
for _, member in ipairs(groups) do
  redis.call('UNLINK', prefix .. 'kept:' .. member)
  redis.call('ZREM', batch, member)
end
return #groups
