#!lua flags=allow-oom
-- Takes groups of a service that were kept for auditors, to be stored in one file. By: reward worker.
-- ARGV: '', groups of a file, seconds that a group waits for others, first number without a file.
-- Changes: unless some are being stored, moves the oldest from `kept` to `kept_batch`, if there are enough or the first
--   has waited.
-- Returns: number of the file, then the groups that are being stored; nothing if there are none. For a repeat the same.
local kept, batch = prefix .. 'kept', prefix .. 'kept_batch'
local taken = redis.call('ZRANGE', batch, 0, -1, 'WITHSCORES')
if #taken == 0 then
  local waiting = redis.call('ZRANGE', kept, 0, ARGV[2] - 1, 'WITHSCORES')
  if #waiting == 0 or #waiting < 2 * ARGV[2] and now - waiting[2] < tonumber(ARGV[3]) then return {} end
  local file = math.max(tonumber(ARGV[4]), tonumber(redis.call('HGET', counters, 'kept_file') or 0) + 1)
  redis.call('HSET', counters, 'kept_file', file)
  for i = 1, #waiting, 2 do
    redis.call('ZREM', kept, waiting[i])
    redis.call('ZADD', batch, file, waiting[i])
  end
  taken = redis.call('ZRANGE', batch, 0, -1, 'WITHSCORES')
end
local answer = {taken[2]}
for i = 1, #taken, 2 do answer[#answer + 1] = taken[i] end
return answer
