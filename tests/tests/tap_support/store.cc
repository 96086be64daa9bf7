// The two functions of Mooncake's client library that the connector calls, under their own names: a put with several
// returns, one of them by a jump to another function, and a get whose result is an object.
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <time.h>

static void pass_time(long microseconds) {
    timespec time = {0, microseconds * 1000};
    nanosleep(&time, nullptr);
}

[[noreturn]] __attribute__((noinline)) static void fail() { throw std::runtime_error("thrown"); }

namespace mooncake {
struct ReplicateConfig { int replicas; };
struct BufferHandle { char byte; };

__attribute__((noinline, visibility("default"))) int toInt(int code) {
    asm volatile("");
    return -code;
}

struct RealClient {
    virtual int put(const std::string &key, std::span<const char> value, const ReplicateConfig &config);
    virtual std::shared_ptr<BufferHandle> get_buffer(const std::string &key);
    long calls = 0;
};

__attribute__((visibility("default"))) int RealClient::put(const std::string &key, std::span<const char> value,
                                                          const ReplicateConfig &config) {
    if (value.size() == 2) return 5;
    if (value.size() % 2 && value.size() < 1000) {
        calls += key.size();
        return value.size() == 1 ? (fail(), 1) : 0;
    }
    if (value.size() == 0) return toInt(600 + config.replicas);
    pass_time(2000);
    calls += value[0];
    return 0;
}

__attribute__((visibility("default"))) std::shared_ptr<BufferHandle> RealClient::get_buffer(const std::string &key) {
    ++calls;
    if (key.starts_with("missing")) return nullptr;
    pass_time(3000);
    return std::make_shared<BufferHandle>();
}
}

static mooncake::RealClient client;

extern "C" int store_put(const char *key, size_t size) {
    std::string bytes(size, 'x');
    mooncake::RealClient *volatile called = &client;
    try {
        return called->put(key, std::span<const char>(bytes.data(), bytes.size()), {1});
    } catch (const std::runtime_error &) {
        return -1;
    }
}

extern "C" int store_get(const char *key) {
    mooncake::RealClient *volatile called = &client;
    return called->get_buffer(key) != nullptr;
}
