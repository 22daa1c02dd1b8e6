#!lua name=statestore
-- The store's SET as a Redis function: a version above all earlier versions and above the request's
-- timestamp, a limit on clock skew, fencing, NX, NEX and PX. A key is a hash of value, version and
-- fence. The clock is in this script and not in a key, which favours Redis: after a restart, only
-- the wall clock ensures higher versions.

local SKEW_MS = 60000
local clock = { wall = 0, counter = 0 }

local function parse(text)
  local wall, counter, node = string.match(text, '^(%d+):(%d+):([^:]+)$')
  if not wall then
    return nil
  end
  return { wall = tonumber(wall), counter = tonumber(counter), node = node }
end

local function older(a, b)
  if a.wall ~= b.wall then
    return a.wall < b.wall
  end
  if a.counter ~= b.counter then
    return a.counter < b.counter
  end
  return a.node < b.node
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The receive update of a hybrid logical clock.
local function tick(now, seen)
  local wall = math.max(now, clock.wall, seen.wall)
  local counter = 0
  if wall == clock.wall and wall == seen.wall then
    counter = math.max(clock.counter, seen.counter) + 1
  elseif wall == clock.wall then
    counter = clock.counter + 1
  elseif wall == seen.wall then
    counter = seen.counter + 1
  end
  clock.wall, clock.counter = wall, counter
  return string.format('%015d:%05d:StateStore', wall, counter)
end

-- KEYS: the key. ARGV: value, timestamp, fencing token or '', condition ('', 'NX', 'NEX'), expiry in
-- milliseconds or ''.
local function set(keys, args)
  local key, value = keys[1], args[1]
  local seen = parse(args[2])
  if not seen then
    return redis.error_reply('ERR malformed timestamp')
  end
  local now = now_ms()
  if seen.wall > now + SKEW_MS then
    return redis.error_reply('ERR the request timestamp is too far in the future')
  end
  local held = redis.call('HMGET', key, 'v', 'f')
  local token = args[3]
  if held[2] then
    if not token or token == '' then
      return redis.error_reply('ERR a fencing token is required for this request')
    end
    local mine = parse(token)
    if not mine then
      return redis.error_reply('ERR malformed timestamp')
    end
    if older(mine, parse(held[2])) then
      return redis.error_reply('ERR the request fencing token is a lower version')
    end
  end
  local condition = args[4]
  if held[1] and (condition == 'NX' or condition == 'NEX' and held[1] ~= value) then
    return -1
  end
  local version = tick(now, seen)
  if token and token ~= '' then
    redis.call('HSET', key, 'v', value, 't', version, 'f', token)
  else
    redis.call('HSET', key, 'v', value, 't', version)
  end
  if args[5] and args[5] ~= '' then
    redis.call('PEXPIRE', key, args[5])
  elseif held[1] then
    redis.call('PERSIST', key)
  end
  return redis.status_reply('OK')
end

-- The least that keeps a version and checks a fencing token: fixed-width timestamps are compared as
-- text, and versions count up. ARGV: value, timestamp, fencing token or none.
local function set_lean(keys, args)
  local key, token = keys[1], args[3]
  local fence = redis.call('HGET', key, 'f')
  if fence and (not token or token < fence) then
    return redis.error_reply('ERR the request fencing token is a lower version')
  end
  clock.counter = clock.counter + 1
  if token then
    redis.call('HSET', key, 'v', args[1], 't', clock.counter, 'f', token)
  else
    redis.call('HSET', key, 'v', args[1], 't', clock.counter)
  end
  return redis.status_reply('OK')
end

local function get(keys, _)
  return redis.call('HMGET', keys[1], 'v', 't')[1]
end

redis.register_function('state_set', set)
redis.register_function('state_set_lean', set_lean)
redis.register_function { function_name = 'state_get', callback = get, flags = { 'no-writes' } }
