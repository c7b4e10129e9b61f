#!lua flags=allow-oom
-- Drops entries whose work nobody needs any more. By: any consumer, right after it has read them.
-- ARGV: '', stream, then entry, group, index (- for none) of each.
-- Checks: prompts: the phase is open and an index is unpublished; samples: the phase is open and the sample is not
--   terminal; groups: the phase is group_scoring.
-- Changes: acks and deletes those for which that is false. Returns: them.
local name, dropped = ARGV[2], {}
for i = 3, #ARGV, 3 do
  local f = redis.call('HMGET', prefix .. 'group:' .. ARGV[i + 1], 'phase', 'unpublished', 'ended:' .. ARGV[i + 2])
  local needed
  if name == 'prompts' then needed = f[1] == 'open' and f[2] ~= '0' end
  if name == 'samples' then needed = f[1] == 'open' and not f[3] end
  if name == 'groups' then needed = f[1] == 'group_scoring' end
  if not needed then
    retire(name, ARGV[i])
    dropped[#dropped + 1] = ARGV[i]
  end
end
return dropped
